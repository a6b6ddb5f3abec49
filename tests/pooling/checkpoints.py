"""Checkpoints of models that pool, as they are published: random weights and the other files."""

import json

from tests.models.checkpoints import make_checkpoint

MODULES = ("Transformer", "Pooling", "Normalize")


def describe_pooling(directory, mode="lasttoken", modules=MODULES, prompts=None, **settings):
    """Write the files of sentence-transformers."""
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    listed = [
        dict(
            idx=index,
            name=str(index),
            path=paths.get(name, f"{index}_{name}"),
            type=f"sentence_transformers.models.{name}",
        )
        for index, name in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    flags = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    config = {f"pooling_mode_{name}": name == mode for name in flags}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config | settings))
    if prompts is not None:
        text = json.dumps(dict(prompts=prompts, default_prompt_name=None))
        (directory / "config_sentence_transformers.json").write_text(text)


def make_embedder(directory, mode="lasttoken", bare=True, **config):
    """Save an embedding model; return transformers' decoder of the same weights, without a head.
    `bare`: as `AutoModel` saves it, without a head and without a prefix of names."""
    model = make_checkpoint(directory, **config)
    if bare:
        for path in directory.glob("*.safetensors*"):
            path.unlink()
        model.model.save_pretrained(directory)
    describe_pooling(directory, mode)
    return model.model

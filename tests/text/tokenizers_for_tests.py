"""Small tokenizers of every kind, trained here, and texts that are hard to decode piecewise."""

import functools
import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import nanoactor

DEMO = Path(nanoactor.__file__).parent / "models" / "demo"

FAMILY = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}\u200d\N{BOY}"
FLAG = "\N{REGIONAL INDICATOR SYMBOL LETTER N}\N{REGIONAL INDICATOR SYMBOL LETTER O}"
WAVE = "\N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}"

TEXTS = (
    "To be, or not to be, that is the question: whether 'tis nobler, isn't it?",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "مرحبا بالعالم، كيف الحال؟",
    "नमस्ते दुनिया, สวัสดีชาวโลก",
    f"a family {FAMILY}, a flag {FLAG} and a wave {WAVE}!",
    "combining: e\u0301 a\u0308\u0323 o\u0302\u0301 and Zalgo z\u0351\u0343\u0342\u034a",
    "  two spaces,\ttabs\t\tand\n\n newlines \r\n at the end  ",
    "ÀÉÎõü ß ﬁ Ω ½ \u00ad\u00a0 \ufeff \ufffd 𝕏 𠜎",
    "def f(x):\n    return {'a': [x ** 2, -1.5e-3]}  # Größe\n",
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = "two wörds 和"
"""An added token that is not special; its characters are text, not the byte alphabet's."""


def _with_added(tokenizer: Tokenizer, *specials: str) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in specials]
    )
    tokenizer.add_tokens([AddedToken(PLAIN_ADDED, normalized=False)])
    return tokenizer


@functools.cache
def byte_level() -> Tokenizer:
    """As Qwen's: merges of bytes, so that tokens begin and end inside characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    return _with_added(tokenizer, *SPECIALS)


@functools.cache
def single_bytes() -> Tokenizer:
    """Byte-level without merges: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer, *SPECIALS)


@functools.cache
def llama_like() -> Tokenizer:
    """As Llama's: spaces are U+2581, and what the vocabulary lacks becomes byte tokens."""
    texts = ["▁" + text.replace(" ", "▁") for text in TEXTS[:1] + TEXTS[4:7]]
    learner = Tokenizer(models.BPE())
    learner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=160, show_progress=False, limit_alphabet=40)
    )
    learned = json.loads(learner.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    for token in sorted(learned["vocab"], key=learned["vocab"].get):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _with_added(tokenizer, "<unk>", "<s>", "</s>")


@functools.cache
def word_piece() -> Tokenizer:
    """As BERT's: the decoder joins words with spaces and tidies up before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _with_added(tokenizer, "[CLS]", "[SEP]")


@functools.cache
def unigram() -> Tokenizer:
    """As T5's: pieces of a probability model; the decoder drops the first piece's space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _with_added(tokenizer, "</s>")


@functools.cache
def byte_level_in_sequence() -> Tokenizer:
    """Byte-level, but behind a sequence of decoders, so that no table of bytes serves it."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


@functools.cache
def demo() -> Tokenizer:
    """The demo model's."""
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def without_tokenizer_json(path: Path, **config) -> Path:
    """The demo model as Qwen2's checkpoints are: vocab.json and merges.txt, no tokenizer.json.

    `config` changes its tokenizer_config.json.
    """
    path.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (path / name).symlink_to(DEMO / name)
    whole = json.loads((DEMO / "tokenizer.json").read_text())
    (path / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]
    ]
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    added = {str(token.pop("id")): token for token in whole["added_tokens"]}
    values = json.loads((DEMO / "tokenizer_config.json").read_text())
    values |= {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added} | config
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    return path


BYTE_LEVEL = {"demo": demo, "byte_level": byte_level, "single_bytes": single_bytes}
OTHERS = {
    "llama_like": llama_like,
    "word_piece": word_piece,
    "unigram": unigram,
    "byte_level_in_sequence": byte_level_in_sequence,
}
EVERY = {**BYTE_LEVEL, **OTHERS}

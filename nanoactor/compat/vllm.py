"""Replacement for the `vllm` package, for Python programs that were written for vLLM:

    import nanoactor.compat.vllm

    nanoactor.compat.vllm.install()  # before the program's own imports, in each process
    import lm_eval

To run a module as a program: `python -m nanoactor.compat.vllm lm_eval --model vllm ...`.

After `install`, `import vllm` imports this module, and `importlib.metadata` finds a distribution
`vllm`, with the version of vLLM that this module follows. Names that programs import but do not
need exist too, and raise `NotInNanoactor` when used. Other names of vLLM do not exist.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn, TypedDict, cast

import nanoactor
from nanoactor.api import llm as ours
from nanoactor.errors import InvalidRequest, NanoactorError
from nanoactor.requests.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from nanoactor.requests.params import BeamSearchParams, DefaultTokens, SamplingParams, TokenCap
from nanoactor.requests.structured_outputs import StructuredOutputsParams

VERSION = "0.31.0"
"""Version of vLLM that this module follows: the newest that TRL 1.16 accepts without a warning."""


class NotInNanoactor(NanoactorError, NotImplementedError):
    """A program used a part of vLLM that nanoactor does not have."""


class TextPrompt(TypedDict, total=False):
    """A text prompt, as in vLLM."""

    prompt: str
    multi_modal_data: Mapping[str, Any]


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids, as in vLLM."""

    prompt_token_ids: list[int]
    multi_modal_data: Mapping[str, Any]


class LLM(ours.LLM):
    """nanoactor's `LLM`, with additional methods that programs written for vLLM call."""

    @property
    def llm_engine(self) -> Any:
        """Object with `model_config`, the only attribute of vLLM's inner engine that programs
        read."""
        engine = self._llm
        config = SimpleNamespace(
            model=engine.config.model,
            max_model_len=engine.files.max_model_len,
            dtype=engine.facts["dtype"],
            seed=engine.config.seed,
        )
        return SimpleNamespace(model_config=config)

    def generate(  # type: ignore[override]
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: None = None,
        priority: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the finished outputs, as `nanoactor.LLM.generate` does. As in vLLM, `max_tokens`
        is lowered to the room left in the context. `lora_request`, `priority` and
        `tokenization_kwargs` exist only for compatibility and must not be set."""
        _check_none(
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs or None,
        )
        return super().generate(prompts, _with_token_cap(sampling_params), bool(use_tqdm))

    def chat(  # type: ignore[override]
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: None = None,
        chat_template: None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Return the outputs for conversations, as `nanoactor.LLM.chat` does. `max_tokens` is
        treated as in `generate`."""
        _check_none(lora_request=lora_request, chat_template=chat_template)
        if options.pop("chat_template_content_format", "auto") not in ("auto", "openai", "string"):
            raise InvalidRequest(
                'chat_template_content_format must be "auto", "openai" or "string"'
            )
        return super().chat(messages, _with_token_cap(sampling_params), bool(use_tqdm), **options)

    def reset_prefix_cache(self) -> bool:
        """Invalidate the prefix cache, so that later requests reuse no earlier KV blocks. Always
        returns True."""
        return self._call(self._llm.reset_prefix_cache())

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` with a message that refers to vLLM's `LLM`."""
        raise AttributeError(
            f"LLM has no attribute {name!r}; nanoactor has only part of the attributes of "
            "vLLM's LLM"
        )


def _check_none(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotInNanoactor(f"{name} is not supported by nanoactor; only None is accepted")


def _with_token_cap(params: Any) -> Any:
    if isinstance(params, SamplingParams):
        max_tokens = params.max_tokens
        if max_tokens is None or isinstance(max_tokens, DefaultTokens | TokenCap):
            return params
        values = {name: getattr(params, name) for name in SamplingParams.__annotations__}
        return SamplingParams(**{**values, "max_tokens": TokenCap(max_tokens)})
    is_sequence = isinstance(params, Sequence) and not isinstance(params, str)
    return [_with_token_cap(one) for one in params] if is_sequence else params


# -- functions of vLLM's modules ----------------------------------------------------------


def get_tokenizer(
    tokenizer_name: str | Path,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **options: Any,
) -> Any:
    """Load a model's tokenizer with transformers, like the function in `vllm.tokenizers`. Code from
    the model's repository is never run, regardless of `trust_remote_code`."""
    from nanoactor.model_files.files import resolve_model
    from nanoactor.text.huggingface import load_pretrained

    if tokenizer_mode not in ("auto", "hf"):
        raise NotInNanoactor(f'tokenizer_mode must be "auto" or "hf", got {tokenizer_mode!r:.100}')
    directory = resolve_model(str(tokenizer_name), revision, download_dir, weights=False)
    return load_pretrained(directory, **options)


def resolve_chat_template(
    tokenizer: Any,
    chat_template: str | None = None,
    tools: Any = None,
    *,
    model_config: Any = None,
) -> str | None:
    """Return the chat template that a tokenizer uses, or None if there is none, like the function
    in `vllm.renderers.hf`."""
    if chat_template is not None:
        return chat_template
    try:
        return cast("str", tokenizer.get_chat_template(None, tools=tools))
    except ValueError:  # the tokenizer has no template
        return None


def _unavailable(name: str, reason: str) -> Any:
    """Create a class for a name of vLLM that is not available. Creating an instance raises
    `NotInNanoactor` with `reason`."""

    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        raise NotInNanoactor(f"vllm's {name} is not available in nanoactor: {reason}")

    return type(name.rpartition(".")[2], (), {"__init__": refuse, "__module__": "vllm"})


_WEIGHTS_REASON = (
    "the weights of a running engine cannot be replaced; start another engine with the new weights"
)
_MODULES: dict[str, dict[str, Any]] = {
    "": {
        "LLM": LLM,
        "AsyncLLM": nanoactor.AsyncLLM,
        "BeamSearchParams": BeamSearchParams,
        "CompletionOutput": CompletionOutput,
        "RequestOutput": RequestOutput,
        "SamplingParams": SamplingParams,
        "TextPrompt": TextPrompt,
        "TokensPrompt": TokensPrompt,
        "__version__": VERSION,
    },
    "inputs": {"TextPrompt": TextPrompt, "TokensPrompt": TokensPrompt},
    "lora": {},
    "lora.request": {
        "LoRARequest": _unavailable("LoRARequest", "LoRA adapters must be merged into the weights")
    },
    "outputs": {"CompletionOutput": CompletionOutput, "RequestOutput": RequestOutput},
    "renderers": {},
    "renderers.hf": {"resolve_chat_template": resolve_chat_template},
    "sampling_params": {
        "BeamSearchParams": BeamSearchParams,
        "RequestOutputKind": RequestOutputKind,
        "SamplingParams": SamplingParams,
        "StructuredOutputsParams": StructuredOutputsParams,
    },
    "tokenizers": {"get_tokenizer": get_tokenizer},
    "utils": {},
    "utils.network_utils": {
        "get_ip": _unavailable("get_ip", _WEIGHTS_REASON),
        "get_open_port": _unavailable("get_open_port", _WEIGHTS_REASON),
    },
    "distributed": {},
    "distributed.weight_transfer": {},
    "distributed.weight_transfer.nccl_common": {
        "trainer_init": _unavailable("trainer_init", _WEIGHTS_REASON)
    },
    "distributed.weight_transfer.packed_tensor": {
        "packed_nccl_broadcast_producer": _unavailable(
            "packed_nccl_broadcast_producer", _WEIGHTS_REASON
        )
    },
}
"""Contents of vLLM's modules, by module name without the prefix `vllm.`."""


# -- import hook --------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that provides `vllm`, its submodules and its distribution."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a vLLM module, or None for any other module. Raises
        `ModuleNotFoundError` for a vLLM module that is not provided."""
        if name != "vllm" and not name.startswith("vllm."):
            return None
        inner = name.removeprefix("vllm").removeprefix(".")
        if inner not in _MODULES:
            raise ModuleNotFoundError(
                f"No module named {name!r}: nanoactor.compat.vllm does not provide it",
                name=name,
            )
        is_package = any(other.startswith(f"{inner}.") for other in _MODULES) or not inner
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a new module with its names."""
        name = module.__name__
        vars(module).update(_MODULES[name.removeprefix("vllm").removeprefix(".")])

        def missing(attribute: str) -> NoReturn:
            raise AttributeError(f"nanoactor.compat.vllm does not provide {name}.{attribute}")

        vars(module)["__getattr__"] = missing

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yield the `vllm` distribution if it is requested by name, or if all distributions are."""
        name = getattr(context, "name", None)
        if name is None or name.lower() == "vllm":
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    """Metadata of the distribution `vllm`, which is not actually installed."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of a metadata file, or None if there is no such file."""
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n",
            "top_level.txt": "vllm\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return the path unchanged, because the distribution has no files."""
        return Path(path)


def install() -> None:
    """Make `import vllm` import this module from now on. Further calls have no effect. Raises
    `ImportError` if the real package has already been imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "vllm" in sys.modules:
        raise ImportError(
            "vllm has already been imported; call nanoactor.compat.vllm.install() before "
            "importing it"
        )
    sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """Undo `install`. Names that programs have already imported stay valid."""
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _Finder)]
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        if isinstance(getattr(sys.modules[name].__spec__, "loader", None), _Finder):
            del sys.modules[name]


def main() -> None:
    """Run a module as a program: `python -m nanoactor.compat.vllm MODULE [ARGUMENT ...]`."""
    if len(sys.argv) < 2:
        sys.exit(
            f"usage: python -m {__spec__.name if __spec__ else __name__} MODULE [ARGUMENT ...]"
        )
    from nanoactor.compat import vllm  # this file again, under the name that others import

    vllm.install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

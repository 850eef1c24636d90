"""vLLM as a rollout engine, inside the process of the worker that trains.

The engine runs in this process and not in one of its own, so that new weights reach it as tensors, by function call.
Two situations, told apart by whether `torch.distributed` is up when the engine boots:

- *Alone*: vLLM's `uni` executor. It makes itself a process group of size 1 over a temporary file, no port involved, and
  `close` takes that down.
- *One of N ranks*, each with an engine of its own (tensor parallel 1): vLLM's `external_launcher` executor. vLLM takes the
  default group as it finds it and opens subgroups of it, so *the boot is a collective over the default group: every one of
  its ranks has to boot an engine*. Nothing after that is: the ranks generate, load weights and close each at its own pace.
  The tempting `uni` would put every rank on device 0.

vLLM's own shutdown would destroy the default group, which in the second situation is the trainer's. `close` therefore
takes the engine down in steps and leaves a group that was there before. Close the engine before destroying the group.

One live engine a process: vLLM keeps its parallel state in module globals.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl import environment
from hybridrl.protocol.errors import ConfigError, HybridRLError, ModelError, nearest
from hybridrl.rollout.engine import Request, Sample, SamplingParams

if TYPE_CHECKING:
    import vllm

_LOWEST_TEMPERATURE = 0.01  # vLLM raises a smaller one to this


@dataclass(frozen=True, slots=True)
class VLLMConfig:
    """What an engine may hold. `max_length` (tokens) bounds prompt + response, `max_batch` the sequences decoded at once.

    `kv_cache_gib` is the size of the key-value cache, on a CPU as on a GPU, whatever else the device holds. With
    `enforce_eager` nothing is compiled or captured: the faster boot everywhere, the slower decoding on a GPU.
    """

    max_length: int
    max_batch: int = 256
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    kv_cache_gib: float = 1.0
    enforce_eager: bool = True


class VLLMEngine:
    """A `RolloutEngine` over the model at `model_path` (a folder with `config.json` and safetensors; no tokenizer needed).

    Tokens are equal for equal prompt, weights and seed, whatever the batch, as far as the logits are: vLLM's kernels may round
    differently at another batch size, which can turn a draw that falls on the edge between two tokens.
    """

    def __init__(self, model_path: str, config: VLLMConfig) -> None:
        self._config = config
        self._dtype = getattr(torch, config.dtype)
        self._names = _parameter_names(model_path)
        self._tied = {name for names in self._names.values() for name in names[1:]}
        with _process_state_kept():
            group_is_ours = not dist.is_initialized()
            self._engine = _boot(model_path, config)
        # vLLM's finalizer is replaced by ours: at exit, too, only the engine's own goes.
        self._engine.engine_core._finalizer.detach()
        self._finalizer = weakref.finalize(self, _shut_down, self._engine.engine_core.engine_core, group_is_ours)

    def generate(self, requests: Iterable[Request]) -> Iterator[Sample]:
        """Draw every request; yield each sample as it finishes. Closing the iterator early aborts the rest.

        Raises ConfigError, before anything is drawn, for a request that does not fit in `max_length`.
        """
        waiting = list(requests)
        for request in waiting:
            self._check(request)
        self._require_idle("generate")
        return self._run(waiting)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights by Hugging Face name, one tensor at a time, into the live engine.

        vLLM packs linear weights for its kernels, so it keeps what it is given until it has all parts of a linear layer (q, k,
        v or gate, up). It is given copies, because the caller may reuse a buffer in between; in the model's own order of
        parameters, no more than one such layer is held. A tied head may be given or left out.

        Raises ModelError for an unknown name, or if parameters are missing at the end: the engine is then
        unusable until it is given a full set.
        """
        self._require_idle("load_weights")
        given: set[str] = set()
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._copies(weights, given)})
        if missing := [name for name in self._names if name not in given]:
            raise ModelError(f"load_weights was not given {len(missing)} parameters ({missing[0]}, ...): give all of them")
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Free what the engine holds. Call it before `destroy_process_group`; calling it again does nothing."""
        self._finalizer()

    def _run(self, requests: list[Request]) -> Iterator[Sample]:
        from vllm.inputs import tokens_input

        pending: dict[str, Request] = {}
        eager = self._config.enforce_eager
        try:
            for number, request in enumerate(requests):
                pending[str(number)] = request
                self._engine.add_request(str(number), tokens_input(request.prompt), _sampling_params(request.sampling))
            while pending:
                # vLLM compiles a ranking of log-probs that nobody here reads: seconds at the first batch, eager mode or not.
                with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
                    outputs = self._engine.step()
                for output in outputs:
                    if output.finished:
                        yield _sample(pending.pop(output.request_id).index, output)
        finally:
            self._engine.abort_request(list(pending))

    def _copies(self, weights: Iterable[tuple[str, torch.Tensor]], given: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name in self._tied:
                continue
            if name not in self._names:
                raise ModelError(f"load_weights was given '{name}', which the model does not have{nearest(name, self._names)}")
            given.add(name)
            copy = tensor.detach().to(self._dtype, copy=True)
            del tensor  # or it would live on while the caller makes the next
            for every_name in self._names[name]:  # on a CPU a tied head is packed apart, and stays old if left out
                yield every_name, copy

    def _check(self, request: Request) -> None:
        length = len(request.prompt) + request.sampling.max_new_tokens
        if not request.prompt:
            raise ConfigError(f"request {request.index} has an empty prompt: vLLM needs at least one token")
        if length > self._config.max_length:
            raise ConfigError(
                f"request {request.index} may take {length} tokens (prompt {len(request.prompt)} + max_new_tokens "
                f"{request.sampling.max_new_tokens}), but the engine's max_length is {self._config.max_length}: "
                "raise max_length, lower max_new_tokens or drop the prompt"
            )
        if 0 < request.sampling.temperature < _LOWEST_TEMPERATURE:
            raise ConfigError(
                f"vLLM draws at temperature {_LOWEST_TEMPERATURE} or more, not {request.sampling.temperature}: use 0 for greedy"
            )

    def _require_idle(self, what: str) -> None:
        if self._engine.has_unfinished_requests():
            raise HybridRLError(f"{what} while samples are being drawn: exhaust or close the last iterator of generate first")


def _boot(model_path: str, config: VLLMConfig) -> Any:
    """A `vllm.v1.engine.llm_engine.LLMEngine`."""
    environment.apply(environment.vllm_environment())
    if dist.is_initialized():
        device = torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank()
        environment.apply({"RANK": str(dist.get_rank()), "LOCAL_RANK": str(device)})  # what external_launcher goes by
    logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM sets its level up only after it has logged
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            "the rollout engine 'vllm' needs vLLM, which is not installed: pip install 'hybridrl[vllm]' on a GPU machine, "
            "scripts/install_vllm_cpu.py on a CPU, or use the engine 'native'"
        ) from error
    try:
        return _llm(vllm, model_path, config).llm_engine
    except ValueError as error:
        raise ConfigError(f"vLLM refuses {config} for the model at {model_path}: {error}") from error


def _llm(vllm: Any, model_path: str, config: VLLMConfig) -> Any:
    return vllm.LLM(
        model=model_path,
        skip_tokenizer_init=True,
        dtype=config.dtype,
        max_model_len=config.max_length,
        max_num_seqs=config.max_batch,
        # The cache's size is given, so this fraction only serves vLLM's check that it is free: the trainer may hold the rest.
        gpu_memory_utilization=0.01,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
        enforce_eager=config.enforce_eager,
        distributed_executor_backend="external_launcher" if dist.is_initialized() else "uni",
        logprobs_mode="processed_logprobs",  # of the distribution drawn from, after temperature, top-k and top-p
        generation_config="vllm",  # the sampling defaults in the model's folder are not the caller's
        use_tqdm_on_load=False,
    )


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """vLLM's boot seeds every generator of the process and, on a CPU, disables `torch.set_num_threads`: undo both."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _shut_down(core: Any, group_is_ours: bool) -> None:
    """vLLM's `EngineCore.shutdown`, but for the default group, which goes only if the engine made it."""
    from vllm.distributed import parallel_state

    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()  # the boot froze the heap, engine included
    if dist.is_initialized():  # else the subgroups went with the default group
        parallel_state.destroy_model_parallel()
        parallel_state.get_world_group().destroy()
        parallel_state._WORLD = None
        if group_is_ours:
            dist.destroy_process_group()
    gc.collect()


def _parameter_names(model_path: str) -> dict[str, list[str]]:
    """Every parameter's name, and the list of all the names it goes by: more than one for tied weights."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_path} holds no causal language model that transformers can build: {error}") from error
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {same[0]: same for same in names.values()}


def _sampling_params(sampling: SamplingParams) -> vllm.SamplingParams:
    import vllm

    return vllm.SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed % 2**63,  # vLLM reads -1 as "no seed"
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the caller's stop tokens stop
        detokenize=False,
        logprobs=0,  # of the drawn token alone
        flat_logprobs=True,
        output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _sample(index: int, output: Any) -> Sample:
    (completion,) = output.outputs
    if completion.finish_reason not in ("stop", "length"):
        raise HybridRLError(f"vLLM ended request {index} with '{completion.finish_reason}', neither 'stop' nor 'length'")
    return Sample(index, list(completion.token_ids), list(completion.logprobs.logprobs), completion.finish_reason)

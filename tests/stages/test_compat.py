"""Each workaround of mlmsub.runtime.compat is still needed: these fail when a library no longer needs one."""

import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch
from rig import Runner, session


def _fresh(name: str) -> object:
    """The module as the library ships it, untouched by compat."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_save_starts_a_process_for_its_queue() -> None:
    shipped = _fresh("megatron.core.dist_checkpointing.strategies.filesystem_async")
    with mock.patch.object(torch.multiprocessing, "get_context") as context:
        shipped.get_write_results_queue()
    context.assert_called_once_with("spawn")
    context.return_value.Manager.assert_called_once_with()


def test_modelopt_spec_wants_transformer_engine() -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.post_training.modelopt import layers

    if HAVE_TE:
        pytest.skip("Transformer Engine is here")
    with pytest.raises(ImportError, match="Transformer-Engine is not installed"):
        layers.Norm(config=None, hidden_size=8)


def test_latent_attention_lacks_the_replicated_linear() -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if HAVE_TE:
        pytest.skip("Transformer Engine is here")
    assert _fresh("megatron.core.transformer.multi_latent_attention").Linear is None


def test_local_attention_refuses_latent_attention() -> None:
    """The reason for runtime.attention.TorchAttention."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with pytest.raises(TypeError, match="k_channels"):
        DotProductAttention(None, 1, None, "self", k_channels=24, v_channels=16)


def test_restore_calibrates_what_the_weights_hold(stage: Runner, source: Path, tmp_path: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.opt.plugins import restore_sharded_modelopt_state

    from mlmsub.runtime import calibration, checkpoint, hf, model

    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        hf.import_weights(made, source, opened.conf, torch.bfloat16)
        mtq.quantize(made, mtq.FP8_DEFAULT_CFG, calibration.forward_loop(torch.arange(16).view(1, 16), 1, "cpu"))
        checkpoint.save(made, opened.args, tmp_path)
        other = model.build(opened.args, opened.conf, "cpu")
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(torch.nan)
        with pytest.raises(AssertionError, match="nan"):
            restore_sharded_modelopt_state([other], str(tmp_path / "release"))

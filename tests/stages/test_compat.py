"""Each workaround of mlmsub.runtime.models.compat is still needed: these fail when a library no longer needs one."""

import importlib
import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch
from rig import Runner, session


def _fresh(name: str) -> object:
    """The module as the library ships it, untouched by compat."""
    importlib.import_module(name)  # dataclasses look their module up by name
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

    from mlmsub.runtime.checkpoints import checkpoint, hf_import
    from mlmsub.runtime.models import model
    from mlmsub.runtime.quantization import calibration

    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(made, source, opened.conf, torch.bfloat16)
        mtq.quantize(made, mtq.FP8_DEFAULT_CFG, calibration.forward_loop(torch.arange(16).view(1, 16), 1, "cpu"))
        checkpoint.save(made, opened.args, tmp_path)
        other = model.build(opened.args, opened.conf, "cpu")
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(torch.nan)
        with pytest.raises(AssertionError, match="nan"):
            restore_sharded_modelopt_state([other], str(tmp_path / "release"))


@pytest.mark.parametrize(
    ("name", "raised"),
    [("TENorm", ImportError), ("TELinear", AssertionError), ("get_gpt_modelopt_spec", (AttributeError, TypeError))],
)
def test_drafts_are_built_of_transformer_engines_parts(
    name: str, raised: type[Exception], stage: Runner, source: Path
) -> None:
    from megatron.core.extensions import transformer_engine
    from megatron.core.post_training.modelopt.gpt import model_specs
    from modelopt.torch.speculative.plugins import megatron_eagle

    from mlmsub.runtime.models import eagle, model

    if transformer_engine.HAVE_TE:
        pytest.skip("Transformer Engine is here")
    assert not hasattr(transformer_engine.TEDotProductAttention, "forward"), "what the context replaces"
    shipped = getattr(transformer_engine, name, None) or getattr(model_specs, name)
    with session(stage, source) as opened, mock.patch.object(megatron_eagle, name, shipped):
        opened.args.draft_vocab_size = None
        made = model.build(opened.args, opened.conf, "cpu")
        with pytest.raises(raised):
            eagle.add(made, opened.args, eagle.Draft(eagle.architecture(opened.args, {}), {}, False, None))
            assert isinstance(made.eagle_module.fc, torch.nn.Module), "a mock is built without a word"


def test_the_transformer_blocks_default_norm_is_in_float32(stage: Runner, source: Path) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if HAVE_TE:
        pytest.skip("Transformer Engine is here")
    shipped = _fresh("megatron.core.transformer.transformer_block").LayerNormImpl
    with session(stage, source) as opened:
        from mlmsub.runtime.megatron_args import transformer_config

        config = transformer_config(opened.args, opened.conf)
        assert shipped(config, 8, 1e-5).weight.dtype == torch.float32 != config.params_dtype


def test_gpt2_has_no_bytes_to_unicode() -> None:
    shipped = _fresh("transformers.models.gpt2.tokenization_gpt2")
    assert not hasattr(shipped, "bytes_to_unicode")


def test_megatron_reads_each_gradients_norm() -> None:
    """Without Transformer Engine; what stands in for that gives the same norm, and scales by it."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if HAVE_TE:
        pytest.skip("Transformer Engine is here")
    shipped = _fresh("megatron.core.optimizer.clip_grads")
    assert shipped.multi_tensor_scale_tensor_impl is None and shipped.l2_norm_impl is local_multi_tensor_l2_norm
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]])]
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, None, [gradients], False)
    assert norm.tolist() == [5.0]
    clip_grads.multi_tensor_applier(
        clip_grads.multi_tensor_scale_tensor_impl, None, [gradients, gradients], torch.tensor([0.5])
    )
    assert [gradient.flatten().tolist() for gradient in gradients] == [[1.5, 0.0], [0.0, 2.0]]

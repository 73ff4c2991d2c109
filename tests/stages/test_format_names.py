"""The submit side has no modelopt, so it keeps a list of its formats: the same as modelopt's and the stage's."""

from mlmsub.core import quantize_rules
from mlmsub.runtime.quantization import formats, recipes


def test_the_list_of_formats_is_modelopts() -> None:
    import modelopt.torch.quantization as mtq

    assert {name for name in mtq.config.choices if "_KV_" not in name} == quantize_rules.FORMATS


def test_the_stages_own_words_are_known_before_the_job() -> None:
    assert set(formats.ALIASES) == quantize_rules.ALIASES
    assert recipes.AUTO == quantize_rules.AUTO
    assert tuple(formats.KV_FORMATS) == quantize_rules.KV_FORMATS

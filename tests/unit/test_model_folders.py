"""The configs that benchmarks write: of the shapes that they say, and such as the loader runs."""

from pathlib import Path

import pytest

from specahead.engine.loading.config import FamilyConfig, load_config
from specahead.engine.model.families import count_parameters, unbuilt_feature
from specahead.engine.model.head_config import count_head_parameters, is_head, layers_read, unbuilt_in_head
from specahead.lab.benchmarks.model_folders import read_shape_of, write_model
from specahead.lab.benchmarks.shapes import SHAPES

# Of the published models.
PARAMETERS = {
    "70b": 70_553_706_496,
    "8b": 8_030_261_248,
    "0.6b": 596_049_920,
    "30b-a3b": 30_532_122_624,
    "minicpm4-8b": 8_185_253_888,
}


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.drafted])
def test_a_config_says_the_shape_that_was_written(name: str, tmp_path: Path) -> None:
    shape, folder = SHAPES[name], tmp_path / name
    write_model(folder, shape, shape.vocab_size, 4096)
    config = load_config(str(folder))
    assert read_shape_of(str(folder)) == shape
    assert isinstance(config, FamilyConfig)  # it leaves nothing to the family's class, which takes seconds to load
    assert unbuilt_feature(config, on_gpu=True) is None
    assert name not in PARAMETERS or count_parameters(config) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("target", "layers", "parameters"), [("8b", (2, 16, 29), 424_721_664), ("70b", (2, 40, 77), 1_403_059_456)]
)
def test_the_head_of_a_benchmark_is_one(target: str, layers: tuple[int, ...], parameters: int, tmp_path: Path) -> None:
    write_model(tmp_path / "head", SHAPES[f"eagle3-{target}"], SHAPES[target].vocab_size, 4096)
    config = load_config(str(tmp_path / "head"))
    assert is_head(config) and unbuilt_in_head(config, on_gpu=True) is None
    assert layers_read(config, SHAPES[target].num_hidden_layers) == layers
    assert count_head_parameters(config) == parameters

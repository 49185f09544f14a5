"""The ratio against the definition in floats, and against TRL's in a run."""

import pytest
import torch

from dash_trl.update.losses import importance_sampling_ratio
from tests import reference

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("low, high", [(None, 2.0), (0.5, None), (0.8, 1.3), (None, None)])
def test_equals_the_definition(mode, low, high):
    generator = torch.Generator().manual_seed(0)
    old, sampling = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(6, 5, generator=generator) < 0.8).long()
    sampling[0, 1] = torch.nan
    ours = importance_sampling_ratio(old, sampling, mask, mode=mode, clip_min=low, clip_max=high)
    expected = reference.importance_ratio(old.tolist(), sampling.tolist(), mask.tolist(), mode, low, high)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)

import pytest
import torch

from workbench.workloads.sklearn_data import WideBlock, WideResNet, digits_resnet, digits_resnet_stride1


def test_the_variant_differs_in_one_stride_and_what_follows_from_it() -> None:
    strides = {
        name: [
            (key, module.stride)
            for key, module in WideResNet(stride=stride).named_modules()
            if hasattr(module, "stride")
        ]
        for name, stride in (("baseline", 2), ("variant", 1))
    }
    changed = [a[0] for a, b in zip(strides["baseline"], strides["variant"], strict=True) if a != b]
    assert changed == ["blocks.1.conv1", "blocks.1.skip"]
    assert WideResNet(stride=2).classifier.in_features == 64
    assert WideResNet(stride=1).classifier.in_features == 4 * 64


def test_names_tell_them_apart() -> None:
    assert digits_resnet().name == "digits_resnet"
    assert digits_resnet_stride1().name == "digits_resnet_stride1"
    assert digits_resnet(stride=1).config == digits_resnet().config


@pytest.mark.parametrize(("stride", "side"), [(1, 8), (2, 4)])
def test_a_block_adds_its_input(stride: int, side: int) -> None:
    block = WideBlock(4, 8, stride=stride)
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 8, 8)
    assert block(x).shape == (2, 8, side, side)
    torch.testing.assert_close(block(x), block.skip(x))


def test_a_block_of_equal_shapes_is_the_identity_when_its_branch_is_zero() -> None:
    block = WideBlock(4, 4, stride=1)
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(block(x), x)

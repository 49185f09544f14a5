"""The training script of `test_multi_node.py`: `examples/train_math.py`; DeepSpeed compiles nothing."""

import os
import sys

import train_math

from tests.tiny import leave, without_compiled_ops

if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        without_compiled_ops()
    train_math.main(sys.argv[1:])
    leave()

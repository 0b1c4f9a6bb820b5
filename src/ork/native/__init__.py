"""The kernels: a C++ library without Python behind one binding file (`bind.cpp`)."""

from ork.native._core import *  # noqa: F403

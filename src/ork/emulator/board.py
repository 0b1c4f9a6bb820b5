"""The files of a board that programs look at to find its NPU: a folder that stands for /dev/dri and its like."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ork.npu.kernel import DRIVER_NAME

# Every name that programs are known to have written down leads to the NPU; on a board one or two of them do.
NODES = {f"/dev/dri/{name}": DRIVER_NAME for name in ("card0", "card1", "card2")} | {
    f"/dev/dri/renderD{minor}": DRIVER_NAME for minor in (128, 129, 130)
}
_NPU = "sys/devices/platform/fdab0000.npu"
_COMPATIBLE = b"xunlong,orangepi-5\0rockchip,rk3588s\0rockchip,rk3588\0"
_UEVENT = (
    "DRIVER=RKNPU\nOF_NAME=npu\nOF_FULLNAME=/npu@fdab0000\nOF_COMPATIBLE_0=rockchip,rk3588-rknpu\n"
    "OF_COMPATIBLE_N=1\nMODALIAS=of:NnpuT(null)Crockchip,rk3588-rknpu\n"
)


def make(folder: Path, nodes: Iterable[str], version: str) -> None:
    """Fill an empty folder. A node is a link to a character device; `version` is the driver's, as in "0.9.8"."""
    texts: dict[str, bytes | str] = {
        f"{_NPU}/uevent": _UEVENT,
        f"{_NPU}/modalias": "of:NnpuT(null)Crockchip,rk3588-rknpu\n",
        f"{_NPU}/of_node/compatible": b"rockchip,rk3588-rknpu\0",
        "sys/bus/platform/drivers/RKNPU/.keep": "",
        "sys/kernel/debug/rknpu/version": f"RKNPU driver: v{version}\n",
        "sys/kernel/debug/rknpu/load": "NPU load:  Core0:  0%, Core1:  0%, Core2:  0%,\n",
        "sys/firmware/devicetree/base/compatible": _COMPATIBLE,
        "sys/firmware/devicetree/base/model": b"Orange Pi 5\0",
    }
    links = {
        f"{_NPU}/driver": "../../../bus/platform/drivers/RKNPU",
        "sys/bus/platform/drivers/RKNPU/fdab0000.npu": f"../../../../{_NPU.removeprefix('sys/')}",
        "proc/device-tree": "../sys/firmware/devicetree/base",
    }
    for node in nodes:
        links[node.lstrip("/")] = "/dev/null"
        if found := re.fullmatch(r"/dev/dri/(card|renderD)(\d+)", node):
            name, minor = found[1] + found[2], int(found[2])
            texts[f"{_NPU}/drm/{name}/dev"] = f"226:{minor}\n"
            texts[f"{_NPU}/drm/{name}/uevent"] = f"MAJOR=226\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor\n"
            links[f"{_NPU}/drm/{name}/device"] = "../../../fdab0000.npu"
            links[f"sys/class/drm/{name}"] = f"../../devices/platform/fdab0000.npu/drm/{name}"
            links[f"sys/dev/char/226:{minor}"] = f"../../devices/platform/fdab0000.npu/drm/{name}"
    for path, text in texts.items():
        at = folder / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(text if isinstance(text, bytes) else text.encode())
    for path, target in links.items():
        at = folder / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(target)

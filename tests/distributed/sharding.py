"""Meshes of all processes, and parameters that are spread over them beside whole ones."""

from functools import cache

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@cache
def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyz"[: len(shape)]))

"""Process groups of a plan's mesh, and this process's place on it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoplan.codegen.collectives import MeshContext
from autoplan.errors import OptionError
from autoplan.ir import Mesh
from autoplan.runtime import compat


@dataclass(frozen=True)
class RuntimeMesh:
    """A mesh laid over the first ``mesh.size`` ranks.

    Attributes:
        mesh: The plan's mesh.
        device: Where this process computes.
        device_mesh: torch's view of it; None where torch.distributed is not initialised, which one device does not
            need.
        context: What emitted code asks for: coordinates and group names.
        group: Process group of all ranks of the mesh, None without torch.distributed.
        member: Whether this rank is on the mesh; others stay idle.
    """

    mesh: Mesh
    device: torch.device
    device_mesh: DeviceMesh | None
    context: MeshContext
    group: dist.ProcessGroup | None
    member: bool = True

    @property
    def coordinate(self) -> Mapping[str, int]:
        """This rank's index along each axis."""
        return self.context.coordinates

    @classmethod
    def create(cls, mesh: Mesh, device: torch.device | None = None) -> RuntimeMesh:
        """Makes the process groups; collective over all ranks the first time a mesh is asked for.

        Args:
            mesh: The plan's mesh.
            device: Where to compute, by default the process group's device type.

        Raises:
            OptionError: There are fewer ranks than devices in the plan.
        """
        if not dist.is_initialized():
            if mesh.size != 1:
                raise OptionError(
                    f"the plan is for {mesh.size} devices ({mesh}), but torch.distributed is not initialised: start "
                    f"the script with torchrun --nproc-per-node {mesh.size} and call init_process_group first"
                )
            context = MeshContext({axis: 0 for axis in mesh.axes})
            return cls(mesh, device or torch.device("cpu"), None, context, None)
        if dist.get_world_size() < mesh.size:
            raise OptionError(
                f"the plan is for {mesh.size} devices ({mesh}), but only {dist.get_world_size()} ranks are running"
            )
        kind = device.type if device is not None else compat.device_type()
        device_mesh, group = _groups(mesh, kind, dist.group.WORLD)
        if device is None:
            device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return cls(mesh, device, device_mesh, _context(mesh, device_mesh), group, dist.get_rank() < mesh.size)


@functools.lru_cache(maxsize=32)
def _groups(mesh: Mesh, kind: str, world: dist.ProcessGroup) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Process groups are scarce and their making is collective: once per mesh."""
    ranks = torch.arange(mesh.size)
    whole = world if mesh.size == dist.get_world_size() else dist.new_group(ranks.tolist())
    return DeviceMesh(kind, ranks.view(mesh.shape), mesh_dim_names=mesh.axes), whole


def _context(mesh: Mesh, device_mesh: DeviceMesh) -> MeshContext:
    place = device_mesh.get_coordinate()
    if place is None:
        return MeshContext()
    groups = {axis: device_mesh.get_group(axis).group_name for axis in mesh.axes}
    return MeshContext(dict(zip(mesh.axes, place, strict=True)), groups)

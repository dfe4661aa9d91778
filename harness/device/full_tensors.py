"""Full tensors of those that several processes share: a ``DTensor`` has a shard in each process."""

from torch.utils._pytree import tree_map


def is_dtensor(leaf: object) -> bool:
    """Return whether ``leaf`` is a ``DTensor``, without importing that class, which takes most of a
    second."""
    return hasattr(leaf, "full_tensor")


def full_tensors(tree: object, *, keep: bool = True) -> object:
    """Return ``tree`` with each ``DTensor`` replaced by its full tensor on the host. All processes
    must call this. With ``keep=False`` this process gets None in place of full tensors, which
    saves memory."""

    def full(leaf: object) -> object:
        if not is_dtensor(leaf):
            return leaf
        tensor = leaf.full_tensor().cpu()
        if keep:
            return tensor
        return None

    return tree_map(full, tree)

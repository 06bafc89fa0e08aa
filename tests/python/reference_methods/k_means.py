"""K-means as DynaKV's clusters are made by it: seeds by position, few rounds, no empty cluster."""

from __future__ import annotations

import torch

ROUNDS = 6
SPLIT_ROUNDS = 8
NORM_MAX = 1e16  # above it sums of squares may leave fp32


def squares(rows: torch.Tensor) -> torch.Tensor:
    """``[..., width]`` to ``[...]``: squared lengths."""
    return rows.square().sum(-1)


def comparable(keys: torch.Tensor) -> torch.Tensor:
    """``[..., width]`` to ``[...]`` bool: whether a distance to it is a number."""
    return squares(keys / NORM_MAX) <= 1  # no NaN is


def mean_variance(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of ``[n, width]`` keys, and the mean squared distance to it.

    Keys that are not `comparable` count for neither; without any other both are 0.
    """
    keys = keys[comparable(keys)]
    count = max(1, len(keys))
    mean = keys.sum(0) / count
    return mean, squares(keys - mean).sum() / count


def nearest(keys: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """``[n]``: for each key the number of its nearest centroid, the lower of equal ones."""
    return (squares(centroids) - 2 * keys @ centroids.T).argmin(1)


def k_means(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Partitions keys by Lloyd's rounds.

    Seed i is key floor((i + 1/2) n / count). A cluster that is left empty takes the key farthest
    from its centroid in the largest cluster; where all of that are equal it is left out.

    Parameters
    ----------
    keys
        ``[n, width]`` fp32, all `comparable`.
    count
        1 to n.

    Returns
    -------
    Tensor
        ``[n]`` int64, each of 0 to its maximum at least once.
    """
    seeds = ((torch.arange(count) + 0.5) * len(keys) / count).long()
    centroids = keys[seeds]
    for _ in range(ROUNDS):
        label = nearest(keys, centroids)
        _fill_empty(keys, label, centroids)
        centroids = _means(keys, label, centroids)
    return label.unique(return_inverse=True)[1]


def split_in_two(keys: torch.Tensor) -> torch.Tensor:
    """Which of ``[n, width]`` keys, at least 2, stand in the second half: ``[n]`` bool.

    2-means; seeds are the key farthest from the mean, and the one farthest from that. Neither half
    is empty: keys that are all equal are parted in the middle.
    """
    first = keys[int(squares(keys - keys.mean(0)).argmax())]
    second = keys[int(squares(keys - first).argmax())]
    halved = torch.arange(len(keys)) >= (len(keys) + 1) // 2
    if torch.equal(first, second):
        return halved
    found = halved
    for _ in range(SPLIT_ROUNDS):
        is_second = squares(keys - second) < squares(keys - first)
        if is_second.all() or not is_second.any() or torch.equal(is_second, found):
            break
        found = is_second
        first, second = keys[~found].mean(0), keys[found].mean(0)
    return found


def _fill_empty(keys: torch.Tensor, label: torch.Tensor, centroids: torch.Tensor) -> None:
    """Changes `label` in place."""
    sizes = torch.bincount(label, minlength=len(centroids))
    for empty in (sizes == 0).nonzero().flatten().tolist():
        largest = int(sizes.argmax())
        members = (label == largest).nonzero().flatten()
        apart = squares(keys[members] - keys[members].mean(0))
        farthest = int(apart.argmax())
        if bool((keys[members] == keys[members[0]]).all()):
            return
        label[members[farthest]] = empty
        sizes[largest] -= 1
        sizes[empty] = 1


def _means(keys: torch.Tensor, label: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Of each cluster; one that is empty keeps its centroid."""
    sizes = torch.bincount(label, minlength=len(centroids))[:, None]
    sums = torch.zeros_like(centroids).index_add_(0, label, keys)
    return torch.where(sizes > 0, sums / sizes.clamp_min(1), centroids)

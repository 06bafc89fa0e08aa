"""Your own way to choose, in plain torch: five plug-ins to begin from.

    python -m examples.plug_ins

answers questions about one of the reference model's documents with two of them. What they are, and
what the engine keeps to itself: `kvswap_torch.plug_ins`, docs/plug_ins.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvswap_torch import ops
from kvswap_torch.plug_ins import CacheShape, GroupRows, TokenScores, Worth


class MostSimilarKey(GroupRows):
    """Reads the groups whose mean key is most similar (by cosine) to the query of any head."""

    @property
    def width(self) -> int:
        return self.shape.head_dim

    def rows(self, layer: int, keys: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        group = self.shape.group_tokens
        counts = valid.unflatten(1, (-1, group))[:, None, :, :, None]
        sums = (keys.float().unflatten(2, (-1, group)) * counts).sum(3)
        return torch.nn.functional.normalize(sums, dim=-1)

    def scores_of(self, layer, query, rows, scale):
        asked = query.float().unflatten(1, (self.shape.kv_heads, -1))  # [batch, kv_heads, each, ..]
        similar = torch.einsum(
            "bhgqd,bhnd->bhgqn", torch.nn.functional.normalize(asked, dim=-1), rows
        )
        best = similar.amax(2)
        return best if self.shape.heads_apart else best.amax(1)


class LearnedRetention(TokenScores):
    """Keeps the tokens that a small trained gate says will be asked for.

    What TRIM-KV, Locret and others train has this form: of each token, when it is made, a number
    from its key and value, and how fast that is forgotten. The file, safetensors, has for layer i
    ``layers.i.worth`` and ``layers.i.forget``, each ``[kv_heads, 2 * head_dim]``: a token is worth
    ``w . [k, v]``, and keeps the share ``sigmoid(f . [k, v])`` of it with each later token.
    """

    def __init__(self, path: str | Path):
        self._tensors = load_file(path)

    def open(self, shape: CacheShape) -> None:
        super().open(shape)
        wanted = (shape.kv_heads, 2 * shape.head_dim)
        for layer in range(shape.layers):
            for name in ("worth", "forget"):
                matrix = self._tensors.get(f"layers.{layer}.{name}")
                if matrix is None or tuple(matrix.shape) != wanted:
                    came = "nothing" if matrix is None else list(matrix.shape)
                    raise ValueError(f"layers.{layer}.{name}: must be {list(wanted)}, got {came}")

    def worth(self, layer, query, keys, values):
        seen = torch.cat([keys, values], -1).float()  # [batch, kv_heads, tokens, 2 * head_dim]
        of_head = [
            torch.einsum("bhtd,hd->bht", seen, self._tensors[f"layers.{layer}.{name}"].float())
            for name in ("worth", "forget")
        ]
        if not self.shape.heads_apart:
            of_head = [part.mean(1) for part in of_head]
        now, share = of_head
        return Worth(now, -torch.nn.functional.logsigmoid(share))


class AskedFromAhead(TokenScores):
    """Keeps what the newest queries would attend if they stood where the answer will stand.

    As DapQ has it, the prompt's last queries, turned on to the positions of the tokens to come,
    stand for those tokens' queries. A prompt is to come in one pass: each pass is valued by its own
    queries, and tokens that are decoded are worth what they get of themselves.
    """

    def __init__(self, rope_theta: float, window: int = 32, ahead: int = 32):
        self._theta, self._window, self._ahead = rope_theta, window, ahead

    def worth(self, layer, query, keys, values):
        batch, kv_heads, tokens, _ = keys.shape
        if query is None:
            return Worth(torch.zeros(self._size(batch, kv_heads, tokens)))
        asked = turned(query[:, :, -self._window :].float(), self._ahead, self._theta)
        asked = asked.unflatten(1, (kv_heads, -1))
        products = torch.einsum("bhgqd,bhtd->bhgqt", asked, keys.float())
        weights = (products * keys.shape[-1] ** -0.5).softmax(-1).mean((2, 3))
        return Worth(weights if self.shape.heads_apart else weights.mean(1))

    def _size(self, batch: int, kv_heads: int, tokens: int) -> tuple[int, ...]:
        return (batch, kv_heads, tokens) if self.shape.heads_apart else (batch, tokens)


class DefensiveKV(TokenScores):
    """Keeps tokens by the most that any of a prompt's newest queries pays them, not by the mean.

    The rule of DefensiveKV (arXiv 2510.13334), after its published code. The newest `window`
    queries' attention on the tokens before them is averaged over `kernel` neighbours, each query's
    sum left as it was. A token is worth the largest of it over the window and the query heads of
    its KV head, and at least the mean over tokens. With `output`, each layer's ``o_proj.weight``
    ``[hidden, heads * head_dim]``, that is times the norm (the sum of magnitudes) of what its value
    adds to the layer's output, the mean over query heads, as in CriticalKV. The window's tokens are
    worth as much as the best.

    Not here: CriticalKV's first stage, in which the most attended tokens stay whatever their norm,
    until 0.9 of the attention is held; the code's division of norms by their sum over KV heads;
    and other numbers of tokens for each head or, of Layer-DefensiveKV, for each layer. A prompt is
    to come in one pass, without padding. Tokens of a pass no longer than the window, decoded ones
    too, are worth nothing: the newest stay by ``selection.recent_tokens``.
    """

    def __init__(
        self, window: int = 32, kernel: int = 5, output: Sequence[torch.Tensor] | None = None
    ):
        self._window, self._kernel, self._output = window, kernel, output

    def worth(self, layer, query, keys, values):
        batch, kv_heads, tokens, _ = keys.shape
        before = tokens - self._window
        each = torch.zeros(batch, kv_heads, tokens, device=keys.device)
        if query is not None and before > 0:
            most = self._pooled(query, keys).amax((2, 3))
            floored = most.maximum(most.mean(-1, keepdim=True))
            if self._output is not None:
                floored *= self._norms(self._output[layer], values[:, :, :before])
            best = floored.amax(-1, keepdim=True).expand(-1, -1, self._window)
            each = torch.cat([floored, best], -1)
        return Worth(each if self.shape.heads_apart else each.mean(1))

    def _pooled(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """``[batch, kv_heads, query heads of each, window, tokens before it]``."""
        tokens, window = keys.shape[2], self._window
        asked = query[:, :, -window:].float().unflatten(1, (keys.shape[1], -1))
        products = torch.einsum("bhgqd,bhtd->bhgqt", asked, keys.float()) * keys.shape[-1] ** -0.5
        later = torch.ones_like(products, dtype=torch.bool).triu(tokens - window + 1)
        weights = products.masked_fill(later, -torch.inf).softmax(-1)
        weights = weights[..., : tokens - window]
        pooled = torch.nn.functional.avg_pool1d(
            weights.flatten(0, 3)[:, None], self._kernel, 1, self._kernel // 2
        )[:, 0].reshape(weights.shape)
        sums = [part.sum(-1, keepdim=True) for part in (weights, pooled)]
        return pooled * sums[0] / sums[1].clamp(min=1e-30)

    def _norms(self, output: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``[batch, kv_heads, tokens]``: of each value times its query heads' output weights."""
        of_heads = output.detach().to(values.device).float()
        of_heads = of_heads.unflatten(1, (values.shape[1], -1, values.shape[-1]))
        total = values.new_zeros(values.shape[:3], dtype=torch.float32)
        for head in of_heads.unbind(2):  # [hidden, kv_heads, head_dim]
            total += torch.einsum("bhtd,ohd->bhto", values.float(), head).abs().sum(-1)
        return total / of_heads.shape[2]


class LazyEviction(TokenScores):
    """Keeps tokens whose attention has paused for no longer than it did before.

    The rule of LazyEviction (arXiv 2506.15969, section 4). A step activates a token that receives
    at least `alpha` of its attention. MRI is the longest interval between two activations of a
    token, 0 of one that has had none since it was first attended. With s steps since the last one

        importance = 2 sigmoid(-s / MRI) + 2 sigmoid(1 - MRI), the second part 0 where MRI is 0.

    The paper's window W, after which it evicts, is ``retention.refresh_interval``; the W newest
    tokens stay by ``selection.recent_tokens``. What is ours: time counts in tokens; each KV head's
    query heads are averaged, and without ``heads="each"`` the importance of KV heads is. Tokens
    that are no longer among the recent ones are not attended until the next refresh. A token
    that was evicted may come back while it is on disk. A prompt's tokens are worth 1, as if just
    activated, and what its newest queries pay them, of which the summaries below say nothing.

    The paper itself was not at hand. Three summaries of it agree on all but the second part, which
    they write as ``2 sigmoid(-MRI - 1)``, ``2 sigmoid(-1 / (MRI - 1))`` and ``2 sigmoid(-1 /
    MRI)``; all say that a small MRI is worth more, as here. They have no value of `alpha`, which is
    to be set for a model; 1e-4 is that of another implementation.
    """

    notes = 2  # when a token was last activated, 0: not seen yet; and its MRI

    def __init__(self, alpha: float = 1e-4, window: int = 32):
        self._alpha, self._window = alpha, window

    def worth(self, layer, query, keys, values):
        batch, kv_heads, tokens, head_dim = keys.shape
        received = torch.zeros(batch, kv_heads, tokens, dtype=torch.float32, device="cpu")
        if query is not None:
            newest = query[:, :, -self._window :]
            received, _ = ops.observe_keys(newest, keys, head_dim**-0.5)
        return Worth(self._of_heads(1 + received))

    def attended(self, layer, weights, notes):
        last, longest = notes.unbind(-1)  # views
        now = weights.shape[-1]
        last[last == 0] = now
        last.clamp_(max=now)  # a crop may have left later ones
        active = weights >= self._alpha
        longest.copy_(torch.where(active, longest.maximum(now - last), longest))
        last[active] = now
        recent = 2 * torch.sigmoid((last - now) / longest.clamp(min=1e-9))
        often = torch.where(longest > 0, 2 * torch.sigmoid(1 - longest), 0)
        return Worth(self._of_heads(recent + often))

    def _of_heads(self, each: torch.Tensor) -> torch.Tensor:
        return each if self.shape.heads_apart else each.mean(1)


def turned(query: torch.Tensor, positions: int, theta: float) -> torch.Tensor:
    """Queries ``[..., head_dim]`` that RoPE has turned, as if they stood so many positions on."""
    half = query.shape[-1] // 2
    angles = positions * theta ** (-torch.arange(half) / half)
    first, second = query[..., :half], query[..., half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )


def answers(tokens: int = 4000) -> dict[str, list[bool]]:
    """By plug-in, which of a document's questions are answered right."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvswap_torch import KVSwapCache, SwapConfig
    from tools.reference_model.documents import SOURCES, load_source, make_document
    from tools.reference_model.tasks import extract_answer

    folder = Path(__file__).resolve().parent / "reference_model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(text: str) -> torch.Tensor:
        return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

    document, questions = make_document(
        load_source(SOURCES[0]), 1, tokens, lambda text: ids(text).shape[1]
    )
    theta = model.config.rope_parameters["rope_theta"]
    kept = SwapConfig(summary={"kind": "none"}, retention={"policy": "user", "tokens": 1024})
    choices: dict[str, tuple[SwapConfig | None, dict]] = {
        "the default choice": (None, {}),
        "MostSimilarKey": (
            SwapConfig(summary={"kind": "user"}),
            {"group_scores": MostSimilarKey()},
        ),
        "AskedFromAhead": (kept, {"token_scores": AskedFromAhead(theta)}),
    }
    right: dict[str, list[bool]] = {}
    for name, (config, plug_in) in choices.items():
        right[name] = []
        for question in questions:
            prompt = ids(f"{document}\nQuestion: {question.text}\nAnswer:")
            with KVSwapCache(model, ".", config, **plug_in) as cache:
                out = model.generate(
                    prompt, **cache.as_argument(), max_new_tokens=16, do_sample=False
                )
            told = extract_answer(tokenizer.decode(out[0, prompt.shape[1] :]))
            right[name].append(told == question.answer)
    return right


if __name__ == "__main__":
    for name, each in answers().items():
        print(f"{name}: {sum(each)} of {len(each)} right")

"""One training run: steps, probes, checkpoints."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from tools.reference_model.checkpoint import CheckpointWriter, load_checkpoint
from tools.reference_model.dilution import Dilution, show
from tools.reference_model.model import token_losses
from tools.reference_model.phases import Phase
from tools.reference_model.samples import KINDS, WEIGHTS, Batch, Sampler

CHECKPOINT_SECONDS = 180
LOG_STEPS = 20
WARMUP_TOKENS = 200_000
# Length and samples of the probes on held-out text: a second or two each.
PROBES = ((1024, 4), (4096, 1), (8192, 1))
PROBE_SHARE = 0.04  # of the time


@dataclass
class Place:
    """Where a run stands; enough to go on from."""

    phase: int = 0
    phase_tokens: int = 0
    tokens: int = 0
    step: int = 0
    seconds: float = 0.0
    probe_seconds: float = 0.0


@dataclass
class Run:
    """A model in training, with all that belongs to it.

    Not for two processes on one folder: the later one would overwrite the other's checkpoints.
    """

    model: Any
    phases: tuple[Phase, ...]
    sampler: Sampler
    held_out: Sampler
    folder: Path
    seed: int = 0
    device: str = "cpu"
    compiled: bool = True
    place: Place = field(default_factory=Place)
    stopping: bool = False  # set from outside, by a signal

    def __post_init__(self) -> None:
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.optimizers = (
            torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.writer = CheckpointWriter(self.folder)
        self.rng = np.random.default_rng(self.seed)
        self.losses = token_losses
        if self.compiled:
            self.losses = torch.compile(token_losses, dynamic=False)
        self.sums = np.zeros((2, len(KINDS)))
        self.dilution: Dilution | None = None

    def save(self) -> None:
        """Begin to write a checkpoint; `writer.wait()` waits for it."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.bit_generator.state,
            "place": asdict(self.place),
            "phase_name": self.phases[min(self.place.phase, len(self.phases) - 1)].name,
        }
        self.writer.save(state)

    def resume(self) -> list[str]:
        """Go on from the newest whole checkpoint; what to tell the person about damaged ones."""
        state, complaints = load_checkpoint(self.folder)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.bit_generator.state = state["rng"]
        self.place = Place(**state["place"])
        return complaints

    def log(self, **entry: Any) -> None:
        """Append a line to the log."""
        place = self.place
        head = {"step": place.step, "tokens": place.tokens, "seconds": round(place.seconds, 1)}
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(head | entry) + "\n")

    def train(self, seconds_max: float, progress: Progress) -> bool:
        """Train to the end of the curriculum, or for so long.

        Returns
        -------
        bool
            True when the curriculum is finished.
        """
        began = saved = time.monotonic()
        total = sum(phase.tokens for phase in self.phases)
        bar = progress.add_task("training", total=total, completed=self.place.tokens)
        while self.place.phase < len(self.phases):
            phase = self.phases[self.place.phase]
            if self.place.phase_tokens == 0:
                self.log(phase=asdict(phase), seed=self.seed)
            while self.place.phase_tokens < phase.tokens:
                if self.stopping or time.monotonic() - began > seconds_max:
                    self.save()
                    self.writer.wait()
                    return False
                mean = self.step(phase)
                name = f"{phase.name}: loss {mean:.2f}"
                progress.update(bar, completed=self.place.tokens, description=name)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self.probe(phase)
                    self.save()
                    saved = time.monotonic()
            self.place.phase += 1
            self.place.phase_tokens = 0
            self.save()
        self.writer.wait()
        self.probe(self.phases[-1])
        return True

    def set_rates(self, phase: Phase) -> None:
        share = self.place.phase_tokens / phase.tokens
        rate = phase.lr[0] + (phase.lr[1] - phase.lr[0]) * share
        rate *= min(1.0, (self.place.tokens + 1) / WARMUP_TOKENS)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def step(self, phase: Phase) -> float:
        """One step; its weighted loss."""
        began = time.monotonic()
        batch = self.sampler.batch(self.rng, phase)
        self.set_rates(phase)
        self.dilute(phase)
        losses, _ = self.losses(self.model, *self.tensors(batch))
        kinds = batch.kinds[:, 1:]
        weights = torch.from_numpy(WEIGHTS[kinds]).to(self.device)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        mean = loss.item()
        if np.isfinite(mean):
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        place = self.place
        count = batch.ids.size
        place.tokens, place.phase_tokens = place.tokens + count, place.phase_tokens + count
        place.step += 1
        place.seconds += time.monotonic() - began
        self.sums[0] += np.bincount(
            kinds.ravel(), losses.detach().float().cpu().numpy().ravel(), len(KINDS)
        )
        self.sums[1] += np.bincount(kinds.ravel(), minlength=len(KINDS))
        if place.step % LOG_STEPS == 0:
            self.log_losses(phase, count / (time.monotonic() - began))
        return mean

    def dilute(self, phase: Phase) -> None:
        """Show the model a long text beside the next sample, in the phase's share of steps."""
        shown = phase.text_pieces > 0 and self.rng.random() < phase.text_share
        if shown:
            if self.dilution is None:
                made = Dilution(self.model, phase.text_pieces, phase.length, phase.span)
                self.dilution = made
            self.dilution.renew(self.rng, self.sampler.text)
        show(self.model, shown)

    def log_losses(self, phase: Phase, speed: float) -> None:
        seen = self.sums[1] > 0
        means = self.sums[0][seen] / self.sums[1][seen]
        names = [name for name, there in zip(KINDS, seen, strict=True) if there]
        losses = {name: round(float(mean), 3) for name, mean in zip(names, means, strict=True)}
        self.log(phase_name=phase.name, losses=losses, tokens_per_s=round(speed))
        self.sums[:] = 0

    def tensors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids, positions = torch.from_numpy(batch.ids), torch.from_numpy(batch.positions)
        return ids.to(self.device), positions.to(self.device)

    def probe(self, phase: Phase) -> None:
        """Measure exact answers on held-out text, and log them by length and skill."""
        if self.place.probe_seconds > PROBE_SHARE * self.place.seconds:
            return
        began = time.monotonic()
        results = {}
        for length, samples in PROBES:
            if length > 8 * phase.length:
                continue
            settings = Phase("probe", length, samples, 0, (0, 0), 0, 0.0, (200 / length, 0.3))
            results[str(length)] = self.measure(settings)
        self.place.probe_seconds += time.monotonic() - began
        self.log(phase_name=phase.name, accuracy=results)

    @torch.no_grad()
    def measure(self, phase: Phase) -> dict[str, list[int]]:
        """Right answers and questions by skill; an answer is right when every token is."""
        show(self.model, False)
        # The same questions every time, so that the curve is not the luck of the draw.
        batch = self.held_out.batch(np.random.default_rng(7), phase)
        ids, positions = self.tensors(batch)
        counts: dict[str, list[int]] = {}
        for row in range(phase.batch):
            _, hits = token_losses(self.model, ids[row : row + 1], positions[row : row + 1])
            right = hits[0].cpu().numpy()
            for number, first, last in batch.spans:
                if number == row:
                    pair = counts.setdefault(KINDS[batch.kinds[row, first]], [0, 0])
                    pair[0] += int(right[first - 1 : last - 1].all())
                    pair[1] += 1
        return counts

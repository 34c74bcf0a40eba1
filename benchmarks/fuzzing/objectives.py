"""Objectives: losses that separate into micro-batches or not, optimizers and learning-rate schedulers."""

from __future__ import annotations

from fuzzing.part import ANY, Part, by_name

__all__ = ["LOSSES", "OPTIMIZERS", "SCHEDULERS"]

_SEPARATES = "separate|micro-batch|mean over samples|\\(sum, count\\)|loss"

# Lines of loss(output, batch), where `logits` and `target` are rows beside rows, and the labels of some are -100.
LOSSES = by_name(
    (
        Part("cross_entropy", "return F.cross_entropy(logits, target.clamp(min=0))", weight=6),
        Part("squared", "return (logits - F.one_hot(target.clamp(min=0), 3)).square().mean()", weight=3),
        Part("smoothed", "return F.cross_entropy(logits, target.clamp(min=0), label_smoothing=0.1)"),
        Part(
            "counted",
            "return F.cross_entropy(logits, target, ignore_index=-100, reduction='sum'), (target != -100).sum()",
            weight=3,
        ),
        Part(
            "weighted_count",
            "weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)[target.clamp(min=0)]\n"
            "each = F.cross_entropy(logits, target.clamp(min=0), reduction='none')\n"
            "return (weights * each).sum(), weights.sum()",
        ),
        Part(
            "several",
            "one = F.cross_entropy(logits, target, ignore_index=-100, reduction='none')\n"
            "first, second = target == 0, target > 0\n"
            "right = (logits.argmax(-1) == target).double()\n"
            "return {'zero': ((one * first).sum(), first.sum()), 'size': 0.1 * logits.square().mean(),\n"
            "        'more': ((one * second).sum() * 0.5, 2 * second.sum()), 'log': {'right': right.mean()}}",
            weight=4,
        ),
        Part(
            "means_by_name",
            "return {'entropy': F.cross_entropy(logits, target.clamp(min=0)), 'size': logits.square().mean()}",
            weight=2,
        ),
        Part(
            "total_beside_parts",
            "one, size = F.cross_entropy(logits, target.clamp(min=0)), logits.square().mean()\n"
            "return {'loss': one + 0.1 * size, 'one': one, 'size': size}",
            refusal="made of the others",
            must=True,
        ),
        Part(
            "counts_outputs",
            "taken = (logits.argmax(-1) == 0).double()\n"
            "return {'taken': ((logits.square().sum(-1) * taken).sum(), taken.sum()), 'size': logits.square().mean()}",
            refusal="is computed of the model's output|made of the others",
            must=True,
        ),
        Part(
            "regularised",
            "return F.cross_entropy(logits, target.clamp(min=0)) + 0.1 * logits.square().mean() + 0.5",
        ),
        Part("detached_target", "return F.mse_loss(logits.tanh(), logits.detach().softmax(-1))"),
        Part(
            "padded_mean",
            "return F.cross_entropy(logits, target, ignore_index=-100)",
            refusal=_SEPARATES,
            must=True,
        ),
        Part(
            "weighted_mean",
            "return F.cross_entropy(logits, target.clamp(min=0), weight=torch.tensor([1.0, 3.0, 0.2]).double())",
            refusal=_SEPARATES,
            must=True,
        ),
        Part(
            "contrastive",
            "flat = F.normalize(logits, dim=-1)\n"
            "return F.cross_entropy(flat @ flat.t() / 0.2, torch.arange(flat.shape[0]))",
            data=("vectors", "images"),
            refusal=_SEPARATES,
            must=True,
        ),
        Part("summed", "return (logits - 0.3).square().sum()", refusal=_SEPARATES, must=True),
        Part(
            "spread",
            "return F.cross_entropy(logits, target.clamp(min=0)) - 0.1 * logits.std(0).mean()",
            refusal=_SEPARATES,
            must=True,
            least_rows=2,
        ),
        Part(
            "state_in_loss",
            "LOSS_STATE['n'] += 1\nreturn F.cross_entropy(logits, target.clamp(min=0)) / LOSS_STATE['n']",
            refusal=ANY,
        ),
    )
)

_DIVIDED = "shard|divide|part"
OPTIMIZERS = by_name(
    (
        Part("momentum", "return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)", weight=4),
        Part("nesterov", "return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)"),
        Part("adamw", "return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3)", weight=5),
        Part("adam_amsgrad", "return torch.optim.Adam(parameters, lr=1e-2, amsgrad=True)"),
        Part("adagrad", "return torch.optim.Adagrad(parameters, lr=0.05)"),
        Part("rmsprop", "return torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.5, centered=True)"),
        Part("nadam", "return torch.optim.NAdam(parameters, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1)"),
        Part("radam", "return torch.optim.RAdam(parameters, lr=1e-2)"),
        Part("adamax", "return torch.optim.Adamax(parameters, lr=1e-2)"),
        Part("adadelta", "return torch.optim.Adadelta(parameters, lr=0.5)"),
        Part("asgd", "return torch.optim.ASGD(parameters, lr=0.05)"),
        Part("adafactor", "return torch.optim.Adafactor(parameters, lr=1e-2)", refusal=_DIVIDED),
        Part("rprop", "return torch.optim.Rprop(parameters, lr=1e-3)", refusal=_DIVIDED),
        Part(
            "muon",
            "parameters = list(parameters)\n"
            "flat = [p for p in parameters if p.ndim == 2]\n"
            "return torch.optim.Muon(flat, lr=1e-3) if flat else torch.optim.SGD(parameters, lr=0.0)",
            refusal=ANY,
        ),
        Part(
            "decay_of_matrices",
            "parameters = list(parameters)\n"
            "groups = [{'params': [p for p in parameters if p.ndim > 1], 'weight_decay': 0.5},\n"
            "          {'params': [p for p in parameters if p.ndim <= 1], 'weight_decay': 0.0}]\n"
            "return torch.optim.AdamW([g for g in groups if g['params']], lr=1e-2)",
            weight=2,
        ),
        Part(
            "groups_by_identity",
            "parameters = list(parameters)\n"
            "names = {id(p): n for n, p in BUILT[-1].named_parameters()} if BUILT else {}\n"
            "groups = [{'params': [p for p in parameters if names.get(id(p), '').endswith('bias')], 'lr': 0.05},\n"
            "          {'params': [p for p in parameters if not names.get(id(p), '').endswith('bias')]}]\n"
            "return torch.optim.AdamW([g for g in groups if g['params']], lr=1e-2)",
            refusal=ANY,
        ),
        Part(
            "groups_by_place",
            "parameters = list(parameters)\n"
            "half = len(parameters) // 2\n"
            "groups = [{'params': parameters[:half], 'lr': 0.05}, {'params': parameters[half:]}]\n"
            "return torch.optim.AdamW([g for g in groups if g['params']], lr=1e-2)",
            refusal=ANY,
        ),
        Part(
            "rate_of_count",
            "parameters = list(parameters)\nreturn torch.optim.SGD(parameters, lr=0.5 / len(parameters))",
            refusal=ANY,
        ),
        Part("global_norm", "return GlobalNorm(parameters, lr=0.05)", refusal=ANY),
        Part(
            "of_other_parameters",
            "return torch.optim.SGD(BUILT[-1].parameters() if BUILT else parameters, lr=0.05)",
            refusal=ANY,
        ),
        Part(
            "left_out",
            "parameters = list(parameters)\n"
            "kept = [p for p in parameters if p.ndim > 1]\n"
            "return torch.optim.SGD(kept or parameters, lr=0.05 if kept else 0.0)",
        ),
        Part(
            "groups_by_name",
            "pairs = list(named_parameters)\n"
            "groups = [{'params': [p for n, p in pairs if n.endswith('bias')], 'weight_decay': 0.0},\n"
            "          {'params': [p for n, p in pairs if not n.endswith('bias')], 'weight_decay': 0.5}]\n"
            "return torch.optim.AdamW([g for g in groups if g['params']], lr=1e-2)",
            weight=2,
        ),
    )
)
SCHEDULERS = by_name(
    (
        Part("steps", "return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)"),
        Part("cosine", "return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)"),
        Part("warm_up", "return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))"),
        Part("plateau", "return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)"),
    )
)

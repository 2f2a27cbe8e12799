"""Several plain MLPs of one shape as one: batched products, one parameter vector, one Adam.

A critic ensemble as separate modules under automatic differentiation spends as long on dispatch,
recording and walking parameters as on arithmetic. Here E members of a layer are one batched
product, derivatives are written by hand, and what an optimizer or a slow copy does to parameters is
a few passes over one vector. ``fused_sac`` and ``fused_td3`` are made of these parts.

Shape suffixes: ``E`` members, ``B`` rows, ``D`` input features, ``O`` outputs, ``P`` parameters of
all members.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ACTIVATIONS", "Activations", "FlatAdam", "FlatMLP", "is_plain_adam"]

ACTIVATIONS = ("relu", "tanh")
"""Activations between the layers that `FlatMLP` computes."""

_NARROW = 8
"""How many times fewer inputs than outputs make the transposed product the faster one."""


class Activations(NamedTuple):
    """What a forward pass keeps for the way back.

    Attributes:
        inputs: what went in, [B, D].
        hidden: outputs of the hidden layers, after the activation, [E, B, width] each.
    """

    inputs: Tensor
    hidden: list[Tensor]

    def rows(self, rows: slice) -> Activations:
        """Return those of some rows."""
        return Activations(self.inputs[rows], [layer[:, rows] for layer in self.hidden])


class FlatMLP:
    """E MLPs whose parameters are copied from their modules into one vector, and back.

    Args:
        members: the linear layers of each, of the same shapes; at least one.
        activation: between them; one of `ACTIVATIONS`.

    Attributes:
        parameters: the modules' parameters, in the order of the vector: by layer, weights of all
            members and then biases.
        flat: the vector, [P].
    """

    def __init__(self, members: Sequence[Sequence[nn.Linear]], activation: str) -> None:
        self.activation = activation
        self.parameters: list[Tensor] = []
        self._shapes: list[tuple[int, int, int]] = []
        for layer in zip(*members, strict=True):
            self._shapes.append((len(members), *layer[0].weight.shape))
            self.parameters += [member.weight for member in layer]
            self.parameters += [member.bias for member in layer]
        self.flat = self.zeros()
        self.by_parameter = self.cut(self.flat)
        self.weights, self.biases = self._layers(self.flat)
        self._memory: dict[tuple[str, int, int], Tensor] = {}

    @staticmethod
    def supports(members: Sequence[Sequence[nn.Linear]]) -> bool:
        """Return whether these layers can be computed as one: same shapes, biased, on a CPU."""
        shapes = {tuple(layer.weight.shape for layer in member) for member in members}
        layers = [layer for member in members for layer in member]
        if len(shapes) != 1 or not layers or any(layer.bias is None for layer in layers):
            return False
        return all(
            p.device.type == "cpu" and p.dtype == layers[0].weight.dtype and p.is_floating_point()
            for layer in layers
            for p in layer.parameters()
        )

    def zeros(self) -> Tensor:
        """Return a new vector like `flat`, of zeros."""
        size = sum(parameter.numel() for parameter in self.parameters)
        return torch.zeros(size, dtype=self.parameters[0].dtype)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a vector, in its shape."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _layers(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Cut a vector into weights [E, out, in] and biases [E, 1, out] by layer."""
        weights, biases, start = [], [], 0
        for members, n_out, n_in in self._shapes:
            middle = start + members * n_out * n_in
            stop = middle + members * n_out
            weights.append(flat[start:middle].view(members, n_out, n_in))
            biases.append(flat[middle:stop].view(members, 1, n_out))
            start = stop
        return weights, biases

    def pull(self) -> None:
        """Copy the modules' parameters into the vector."""
        torch._foreach_copy_(self.by_parameter, [p.detach() for p in self.parameters])

    def push(self) -> None:
        """Copy the vector into the modules' parameters."""
        torch._foreach_copy_(self.parameters, self.by_parameter)

    # ---- computing -----------------------------------------------------------------------------

    def forward(
        self, inputs_BD: Tensor, *, n_members: int | None = None
    ) -> tuple[Tensor, Activations]:
        """Compute a batch.

        Args:
            inputs_BD: what goes in.
            n_members: compute the first so many; None: all.

        Returns:
            Outputs [E, B, O]; and the activations, in memory that the next batch of as many rows
            reuses.
        """
        n_rows, some = len(inputs_BD), slice(n_members)
        hidden: list[Tensor] = []
        below = inputs_BD.expand(len(self.weights[0][some]), -1, -1)
        last = len(self.weights) - 1
        for i in range(len(self.weights)):
            weight, bias = self.weights[i][some], self.biases[i][some]
            if i == last:
                return self._head(below, weight, bias), Activations(inputs_BD, hidden)
            out = self._room("hidden", i, n_rows)[some]
            torch.baddbmm(bias, below, weight.transpose(1, 2), out=out)
            below = out.relu_() if self.activation == "relu" else out.tanh_()
            hidden.append(below)
        raise AssertionError("unreachable: a network has a last layer")

    @staticmethod
    def _head(below: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if weight.shape[1] == 1:  # a product with one row is faster than one with one column
            return torch.baddbmm(bias, weight, below.transpose(1, 2)).transpose(1, 2)
        return torch.baddbmm(bias, below, weight.transpose(1, 2))

    def _room(self, use: str, layer: int, n_rows: int) -> Tensor:
        key = (use, layer, n_rows)
        if key not in self._memory:
            members, width, _ = self._shapes[layer]
            self._memory[key] = self.flat.new_empty(members, n_rows, width)
        return self._memory[key]

    def gradients(self, kept: Activations, d_out_EBO: Tensor, into: Tensor) -> None:
        """Write the gradient of the parameters, [P], from that of the outputs."""
        weights, biases = self._layers(into)
        delta = d_out_EBO
        for i in reversed(range(len(weights))):
            below = kept.hidden[i - 1] if i else kept.inputs.expand(len(delta), -1, -1)
            if below.shape[-1] * _NARROW <= delta.shape[-1]:
                weights[i].copy_(torch.bmm(below.transpose(1, 2), delta).transpose(1, 2))
            else:
                torch.bmm(delta.transpose(1, 2), below, out=weights[i])
            torch.sum(delta, 1, keepdim=True, out=biases[i])
            if i:
                delta = self._through(i, delta, kept)

    def chosen_input_gradient(
        self, kept: Activations, member_B: Tensor, d_out_BO: Tensor, columns: slice
    ) -> Tensor:
        """Return the gradient of some input columns where one member of each row counts.

        Args:
            kept: of the forward pass.
            member_B: the one that counts, int64.
            d_out_BO: gradient of its outputs.
            columns: of the inputs.

        Returns:
            [B, columns].
        """
        gradient = torch.empty_like(kept.inputs[:, columns])
        for member in range(len(self.weights[0])):
            rows = torch.nonzero(member_B == member).squeeze(-1)
            hidden = [layer[member].index_select(0, rows) for layer in kept.hidden]
            gradient[rows] = self._to_inputs(member, hidden, d_out_BO[rows], columns)
        return gradient

    def input_gradient(self, kept: Activations, d_out_BO: Tensor, columns: slice) -> Tensor:
        """Return the gradient of some input columns where only the first member counts.

        Args:
            kept: of the forward pass.
            d_out_BO: gradient of that member's outputs.
            columns: of the inputs.

        Returns:
            [B, columns].
        """
        return self._to_inputs(0, [layer[0] for layer in kept.hidden], d_out_BO, columns)

    def _to_inputs(
        self, member: int, hidden: list[Tensor], delta: Tensor, columns: slice
    ) -> Tensor:
        """Take a gradient of one member's outputs back to its inputs."""
        for i in reversed(range(1, len(self.weights))):
            weight = self.weights[i][member]
            delta = delta * weight if len(weight) == 1 else torch.mm(delta, weight)
            delta = self._times_slope(delta, hidden[i - 1])
        # Transposed: a product with few columns is slow, one with few rows is not.
        return torch.mm(self.weights[0][member][:, columns].t(), delta.t()).t()

    def _through(self, layer: int, delta: Tensor, kept: Activations) -> Tensor:
        """Take a gradient of a layer's output back to the output of the linear layer below it."""
        weight, below = self.weights[layer], kept.hidden[layer - 1]
        out = self._room("delta", layer - 1, below.shape[1])
        if weight.shape[1] == 1:
            torch.mul(delta, weight, out=out)
        else:
            torch.bmm(delta, weight, out=out)
        return self._times_slope(out, below)

    def _times_slope(self, delta: Tensor, below: Tensor) -> Tensor:
        """Multiply by the derivative of the activation that gave `below`, in place."""
        if self.activation == "relu":
            torch.ops.aten.threshold_backward.grad_input(delta, below, 0.0, grad_input=delta)
            return delta
        return delta.mul_(1.0 - below * below)


def is_plain_adam(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Return whether `FlatAdam` can stand in for an optimizer of exactly these parameters."""
    if type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) != 1:
        return False
    group = optimizer.param_groups[0]
    return (
        {id(p) for p in group["params"]} == {id(p) for p in parameters}
        and group["weight_decay"] == 0.0
        and not (group["amsgrad"] or group["maximize"])
    )


class FlatAdam:
    """Adam (Kingma & Ba 2015) over one vector, with the state and settings of a torch optimizer.

    The moments of the optimizer become parts of the vectors here: whoever saves the optimizer saves
    them, and what is loaded into it is taken over by the next `begin`.

    Args:
        optimizer: `is_plain_adam` must hold.
        parameters: in the order of the vector.
        cut: cuts a vector into parts like the parameters.
        zeros: returns a vector.

    Attributes:
        gradient: what `step` follows, [P].
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        *,
        cut: Callable[[Tensor], list[Tensor]],
        zeros: Callable[[], Tensor],
    ) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)
        self.gradient = zeros()
        self._by_parameter = cut(self.gradient)
        self._exp_avg, self._exp_avg_sq = zeros(), zeros()
        self._moments = {"exp_avg": cut(self._exp_avg), "exp_avg_sq": cut(self._exp_avg_sq)}
        self._n_steps = torch.zeros(())

    def begin(self) -> None:
        """Take over what the optimizer holds."""
        states = self._optimizer.state
        for name, parts in self._moments.items():
            for parameter, part in zip(self._parameters, parts, strict=True):
                state = states[parameter]
                held = state.get(name)
                if held is None:
                    part.zero_()
                elif held.data_ptr() != part.data_ptr():
                    part.copy_(held)
                state[name] = part
        self._n_steps.fill_(float(states[self._parameters[0]].get("step", 0)))

    def end(self) -> None:
        """Tell the optimizer how many steps there have been."""
        for parameter in self._parameters:
            self._optimizer.state[parameter]["step"] = self._n_steps.clone()

    def step(self, flat: Tensor, on_non_finite: Callable[[Tensor, Tensor], None]) -> None:
        """Move `flat` along `gradient`.

        Args:
            flat: the parameters, [P].
            on_non_finite: called with each parameter and its gradient where a number is not
                finite, before anything moves; it may raise.
        """
        gradient = self.gradient
        if not math.isfinite(float(torch.dot(gradient, gradient))):
            for parameter, part in zip(self._parameters, self._by_parameter, strict=True):
                on_non_finite(parameter, part)
        group = self._optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        adam(
            [flat],
            [gradient],
            [self._exp_avg],
            [self._exp_avg_sq],
            [],
            [self._n_steps],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )

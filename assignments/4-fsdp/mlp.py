"""A small model in NumPy for assignments 2 and 4: units with parameters, gradients and hooks. It knows nothing of ranks."""

import numpy as np


def initial(unit, parameter, seed, begin, end):
    """Initial values of elements [begin, end) of a parameter: they depend only on its name, the seed and the index."""
    key = sum(ord(letter) * 131**i for i, letter in enumerate(f"{unit}.{parameter}.{seed}")) % 1_000_003
    index = np.arange(begin, end, dtype=np.int64)
    return (((index * 48_271 + key) * 69_621 % 2_147_483_647 % 20_011).astype(np.float32) - np.float32(10_005)) / np.float32(200_000)


class Unit:
    """y = relu(x W + b). `parameters` and `gradients` hold arrays only while their owner, such as FSDP, puts them there."""

    def __init__(self, name, width_in, width_out, activation=True):
        self.name, self.activation = name, activation
        self.shapes = {"weight": (width_in, width_out), "bias": (width_out,)}  # in the order of the flat parameter
        self.parameters, self.gradients = {}, {}  # by name: arrays of f32, which may be views
        self.pre_forward = self.post_forward = self.pre_backward = self.post_backward = None  # hooks: called without arguments
        self.uses = True  # False: the model leaves it out

    def value(self, name):
        if name not in self.parameters:
            raise RuntimeError(f"{self.name}.{name} is not readable: its unit is resharded")
        return self.parameters[name]

    def forward(self, x):
        if self.pre_forward:
            self.pre_forward()
        y = self.compute(x)
        if self.post_forward:
            self.post_forward()
        return y

    def backward(self, gradient):
        """From the gradient of y: overwrites the arrays in `gradients`, and returns the gradient of x."""
        if self.pre_backward:
            self.pre_backward()
        result = self.compute_backward(gradient)
        if self.post_backward:
            self.post_backward()
        return result

    def compute(self, x):
        y = x @ self.value("weight") + self.value("bias")
        self.saved = (x, y)
        return np.maximum(y, np.float32(0)) if self.activation else y

    def compute_backward(self, gradient):
        x, y = self.saved
        self.saved = None
        if self.activation:
            gradient = gradient * (y > 0)
        for name in self.shapes:
            if name not in self.gradients:
                raise RuntimeError(f"{self.name}.{name} has no memory for its gradient: put an array into unit.gradients")
        np.matmul(x.T, gradient, out=self.gradients["weight"])
        np.sum(gradient, axis=0, out=self.gradients["bias"])
        return gradient @ self.value("weight").T


class Mlp:
    WIDTHS = (23, 251, 190, 231, 17)

    def __init__(self, widths=WIDTHS):
        last = len(widths) - 2
        self.units = [Unit(f"layer{i}", widths[i], widths[i + 1], i < last) for i in range(last + 1)]

    def loss(self, x, target):
        """Forward: the mean squared error."""
        for unit in self.units:
            x = unit.forward(x) if unit.uses else x
        self.error = x - target
        return float(np.mean(self.error * self.error))

    def backward(self):
        """The gradients of the loss."""
        gradient = self.error * np.float32(2 / self.error.size)
        for unit in reversed(self.units):
            gradient = unit.backward(gradient) if unit.uses else gradient

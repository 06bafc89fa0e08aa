"""How wide a model's keys and values are: counted in one place, for budgets and for presets."""


class KeyValueWidths:
    """What follows from the fields of a model's shape.

    `sides` is 2 for keys and values, 1 for keys that are the values too; `value_dim` 0 means that
    values are as wide as keys.
    """

    kv_heads: int
    head_dim: int
    sides: int
    value_dim: int

    @property
    def value_width(self) -> int:
        """Elements of one KV head's V of one token."""
        return self.value_dim or self.head_dim

    @property
    def head_width(self) -> int:
        """Elements of one KV head's K and V of one token."""
        return self.head_dim + (self.sides - 1) * self.value_width

    @property
    def width(self) -> int:
        """Elements of one token's K in one layer."""
        return self.kv_heads * self.head_dim

"""Train a layer of block-sparse attention to say which token stood 32 places earlier, beside dense attention.

The dense layer has the same mask, weights, batches and steps, and so the same losses. 200 steps take a CPU
a quarter of a minute.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from blocksparse_attn import BlockLayout, blocksparse_attention

TOKENS, WORDS, BACK, HEADS, SIZE = 128, 16, 32, 2, 32
# Blocks of 16 tokens: the query's own, and every second one before it, of which one head has the even and the other the
# odd ones. The token asked for is two blocks back.
layout = BlockLayout.local_strided(HEADS, TOKENS, local_blocks=1, vert_stride=2, block_size=16)
query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
listed = layout.to_mask().repeat_interleave(16, 1).repeat_interleave(16, 2) & (key <= query)


class Layer(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.sparse, width = sparse, HEADS * SIZE
        self.word, self.place = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, WORDS)

    def forward(self, words):  # [B, T]
        x = self.word(words) + self.place.weight
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, SIZE)).unbind(2)  # [B, T, H, D]
        if self.sparse:
            y = blocksparse_attention(q, k, v, layout)
        else:
            y = scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), attn_mask=listed).transpose(1, 2)
        return self.out(y.flatten(2))


def train(steps, report=print):
    """The losses of both layers at each step."""
    layers = []
    for sparse in (True, False):
        torch.manual_seed(0)
        layers.append(Layer(sparse))
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.01) for layer in layers]
    losses = []
    for step in range(steps):
        words = torch.randint(WORDS, (8, TOKENS))
        found = []
        for layer, optimizer in zip(layers, optimizers, strict=True):
            loss = cross_entropy(layer(words)[:, BACK:].flatten(0, 1), words[:, :-BACK].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
        if step % 20 == 0 or step == steps - 1:
            report(f"step {step:3}: loss {found[0]:.4f}, dense under the same mask {found[1]:.4f}")
    return losses


if __name__ == "__main__":
    train(200)

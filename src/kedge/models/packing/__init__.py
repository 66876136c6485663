"""Forward passes and decoding without padding.

    padded rollout ──unpad──▶ TokenRows ──sort by length──▶ trunk, one long row of tokens ──▶ states, one per token
    [rows, width]             [tokens]                       │            ▲
                                                             ▼ attention  │ gather
                                                      rectangles of rows of similar length

`packed.py` runs a model on real tokens only, and reads a prompt of several rows once. `trunk.py` chooses how a model is
run: packed, or padded if its attention cannot be packed. `probe.py` measures, when a model is loaded, that this gives
what transformers gives for each row alone. A state is read at a row's last token (`TokenRows.last`) or per slot of a
rollout (`_Reading`). Only the results, one number per token, are padded again.
"""

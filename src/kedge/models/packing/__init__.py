"""Forward passes and decoding without padding.

    padded rollout ──unpad──▶ TokenRows ──sort by length──▶ trunk, one long row of tokens ──▶ states, one per token
    [rows, width]             [tokens]                       │            ▲
                                                             ▼ attention  │ gather
                                                      rectangles of rows of similar length

`rows.py` has the rows and their rectangles. `packed.py` runs a model on real tokens only, reads a prompt shared by
several rows once, and samples in the same way. `decoders.py` has the decoders of models that cannot be packed.
`trunk.py` chooses how to run a model. `probe.py` verifies, when a model is loaded, that the results match those of
transformers for each row alone. States are read at a row's last token (`TokenRows.last`) or per slot of a rollout
(`_Reading`). Only the results, one number per token, are padded again.
"""

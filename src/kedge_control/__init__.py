"""PPO and TRPO on Gymnasium's environments, with the update that trains language models; the stage `kedge control`.

    environments ─▶ steps ─▶ experience ─▶ PPO epochs (kedge.training) ─▶ metrics, model/

kedge never imports this package: it finds it through `stage/description.py`, like any other package's stage.
"""

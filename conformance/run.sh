#!/bin/sh
# Installs the peers at their pinned versions, runs the suite on each, and writes the results and the page.
#
#     conformance/run.sh [FOLDER]    FOLDER is where the peers go; the default is conformance/.peers
#
# PYTHON is an interpreter with the packages of BASE; without it, one is made. Each peer is a folder without its
# dependencies, because some need CUDA, Ray or vLLM; what its functions need is in BASE and SHARED, and the adapters put
# stand-ins in the place of the rest.
set -eu
cd "$(dirname "$0")/.."
PEERS=${1:-conformance/.peers}
BASE="torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 peft==0.21.2 trl==1.16.0"
SHARED="ray tensordict pyvers omegaconf hydra-core antlr4-python3-runtime==4.9.3 codetiming loguru jaxtyping lazy_loader
 wadler-lindig cloudpickle importlib-metadata zipp msgpack orjson jsonschema jsonschema-specifications referencing
 rpds-py torchdata gymnasium farama-notifications pandas matplotlib"
mkdir -p "$PEERS"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$PEERS/base/bin/python
    [ -x "$PYTHON" ] || { python3 -m venv "$PEERS/base" && "$PYTHON" -m pip install --quiet $BASE; }
fi

add() { # FOLDER PACKAGES…
    folder=$PEERS/$1; shift
    [ -d "$folder" ] || "$PYTHON" -m pip install --quiet --no-deps --target "$folder" "$@"
}

run() { # RESULT ADAPTER FOLDER: the peer's folder comes first. Exit code 1 says that something deviates.
    PYTHONPATH="src:$PEERS/$3:$PEERS/$3/skyrl-gym:$PEERS/shared" OMP_NUM_THREADS=1 \
        "$PYTHON" -m ppo_conformance run --adapter "$2" --json "conformance/results/$1.json" > "$PEERS/log" 2>&1 ||
        [ $? -eq 1 ] || { cat "$PEERS/log"; exit 1; }
    grep "passed, " "$PEERS/log"
}

add shared $SHARED
for package in trl==1.16.0 trl==1.12.0 verl==0.9.1 openrlhf==0.11.0 skyrl==0.3.0 miniverl==0.16.0 \
    stable-baselines3==2.9.2; do
    add "$package" "$package"
done
if [ ! -d "$PEERS/agilerl==2.58.0" ]; then
    add agilerl==2.58.0 agilerl==2.58.0
    add arena agilerl-arena==1.29.0  # a part of the same package
    cp -r "$PEERS/arena/agilerl/arena" "$PEERS/agilerl==2.58.0/agilerl/"
fi
run trl-1.16.0 trl trl==1.16.0
run trl-ppo-1.12.0 trl_ppo trl==1.12.0
run verl-0.9.1 verl verl==0.9.1
run openrlhf-0.11.0 openrlhf openrlhf==0.11.0
run skyrl-0.3.0 skyrl skyrl==0.3.0
run agilerl-2.58.0 agilerl agilerl==2.58.0
run miniverl-0.16.0 miniverl miniverl==0.16.0
run stable-baselines3-2.9.2 sb3 stable-baselines3==2.9.2
"$PYTHON" conformance/page.py

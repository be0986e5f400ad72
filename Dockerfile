# A training image for CUDA machines:
#   docker build -t dlrm_fused .
#   docker run --gpus all --ipc host -v "$PWD/data/criteo:/app/data/criteo" -v "$PWD/runs:/app/runs" dlrm_fused \
#       torchrun --standalone --nproc-per-node=gpu train.py --config configs/criteo_kaggle.yaml data.path=data/criteo
# Data sets and runs are mounted, never copied into it; the container's user (10001) must be able to write to runs/.

# The CUDA release of requirements/cuda.txt's torch, whose wheels bring the CUDA libraries; Ubuntu's Python is 3.12.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# Triton compiles launchers with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 trainer && install -d -o trainer /app
# By number, so that Kubernetes can see that it is not root.
USER 10001
WORKDIR /app

# Packages first: they change less often than the code. No GPU is visible while the image is built, so the device is named.
ENV DEVICE=cuda PIP_NO_CACHE_DIR=1
COPY --chown=10001 Makefile ./
COPY --chown=10001 requirements/ requirements/
RUN make packages
COPY --chown=10001 . .
RUN make setup

ENV PATH=/app/.venv/bin:$PATH
CMD ["torchrun", "--standalone", "--nproc-per-node=gpu", "train.py", "--config", "configs/synthetic.yaml"]

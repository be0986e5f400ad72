# A training image for CUDA machines:
#   docker build -t dlrm_fused .
#   docker run --gpus all --ipc host -v "$PWD/data/criteo:/app/data/criteo" -v "$PWD/runs:/app/runs" dlrm_fused \
#       torchrun --standalone --nproc-per-node=gpu train.py --config configs/criteo_kaggle.yaml data.path=data/criteo
# Data sets and runs are mounted, never copied into it; the container's user (10001) must be able to write to runs/.
#
# A service of an exported model, on CPUs (docs/export_and_serve.md):
#   docker build -t dlrm_fused_serve --target serve .
#   docker run -p 8000:8000 -v "$PWD/model:/model:ro" dlrm_fused_serve

# Torch's CPU build, NumPy and the HTTP framework; of this package only what the service imports.
FROM python:3.12.12-slim AS serve
RUN useradd --create-home --uid 10001 server
WORKDIR /app
COPY requirements/stacks/2.14.txt requirements/serve.txt requirements/
RUN grep '^torch==' requirements/2.14.txt > requirements/torch.txt \
    && pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -r requirements/torch.txt -r requirements/serve.txt
# Owned by the user of the service, who could not read what a strict umask has checked out.
COPY --chown=10001 dlrm_fused/__init__.py dlrm_fused/checksums.py dlrm_fused/errors.py dlrm_fused/paths.py dlrm_fused/records.py dlrm_fused/
COPY --chown=10001 dlrm_fused/datasets/__init__.py dlrm_fused/datasets/hashing.py dlrm_fused/datasets/table_format.py \
    dlrm_fused/datasets/transformation.py dlrm_fused/datasets/values.py dlrm_fused/datasets/
COPY --chown=10001 dlrm_fused/inference/__init__.py dlrm_fused/inference/
COPY --chown=10001 dlrm_fused/inference/export/__init__.py dlrm_fused/inference/export/loader.py dlrm_fused/inference/export/
COPY --chown=10001 dlrm_fused/inference/http dlrm_fused/inference/http
USER 10001
EXPOSE 8000
ENTRYPOINT ["python", "-m", "dlrm_fused.inference.http", "--model", "/model", "--host", "0.0.0.0"]

# The CUDA release of the newest stack's torch, whose wheels bring the CUDA libraries; Ubuntu's Python is 3.12.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS train

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

# CPU:   docker build --build-arg TORCH_INDEX=URL -t gtp-serve:cpu .       URL: a package index with torch's CPU build
# CUDA:  docker build --build-arg TRITON=1 -t gtp-serve:cuda .       PyPI's torch brings CUDA's libraries itself
# Run:   docker run -p 127.0.0.1:30000:30000 -v /ckpts:/ckpts:ro gtp-serve:cpu --ckpt /ckpts/my-run --host 0.0.0.0
#        with --gpus all for CUDA; docs/operations.md has sizes, the health check and what else a deployment needs.

ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=""
# Extras of this package, with commas: flashinfer, flash-attn, otel, demo.
ARG EXTRAS=""
# 1 for CUDA: Triton needs the compiler once, as the native CPU ops do; what it made is taken along.
ARG TRITON=""
WORKDIR /source
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
RUN python -m venv /opt/gtp-serve
ENV PATH="/opt/gtp-serve/bin:$PATH"
COPY requirements-dev.lock ./
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements-dev.lock)"
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY loaders loaders
COPY server server
COPY gtp_serve gtp_serve
# The lock constrains the versions; only what the server needs is installed.
RUN pip install --constraint requirements-dev.lock ".${EXTRAS:+[$EXTRAS]}" && test -f /opt/gtp-serve/lib/python*/site-packages/gtp_serve/ops/cpu/_native.so
ENV TRITON_CACHE_DIR=/opt/triton TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu
COPY scripts/prebuild_triton.py ./
RUN mkdir -p /opt/triton && if [ -n "$TRITON" ]; then python prebuild_triton.py; fi
# Serving compiles nothing with C++ and installs nothing: headers, test suites, static libraries and pip itself stay here.
RUN find /opt/gtp-serve -depth -type d \( -path '*/torch/include' -o -path '*/torch/test' -o -path '*/site-packages/*/tests' -o -path '*/site-packages/pip' -o -path '*/site-packages/pip-*' -o -name __pycache__ \) -exec rm -rf {} + && find /opt/gtp-serve -name '*.a' -delete && rm -f /opt/gtp-serve/bin/pip* && /opt/gtp-serve/bin/gtp-serve --version

FROM ${PYTHON_IMAGE}
ARG REVISION="unknown"
LABEL org.opencontainers.image.title="gtp-serve" \
      org.opencontainers.image.description="Serve Megatron GTP checkpoints as they lie on disk, and swap their weights while serving" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION"
RUN useradd --create-home --uid 10001 gtp
COPY --from=build /opt/gtp-serve /opt/gtp-serve
COPY --from=build --chown=10001 /opt/triton /opt/triton
COPY scripts/healthcheck.py /opt/gtp-serve/healthcheck.py
ENV PATH="/opt/gtp-serve/bin:$PATH" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    TRITON_CACHE_DIR=/opt/triton TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu
USER 10001
WORKDIR /home/gtp
EXPOSE 30000
# Start-up reads the whole checkpoint: until then /health says 503, and the start period keeps that from counting.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 CMD ["python", "/opt/gtp-serve/healthcheck.py"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["gtp-serve"]

# docker build --build-arg TORCH_INDEX=URL .      URL: a package index with the torch build you want (CPU or CUDA)
# docker run -p 127.0.0.1:30000:30000 -v /ckpts:/ckpts:ro IMAGE --ckpt /ckpts/my-run --host 0.0.0.0

FROM python:3.11-slim AS build
ARG TORCH_INDEX=""
WORKDIR /source
RUN python -m venv /opt/gtp-serve
ENV PATH="/opt/gtp-serve/bin:$PATH" PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements-dev.lock ./
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements-dev.lock)"
COPY pyproject.toml README.md LICENSE ./
COPY loaders loaders
COPY server server
COPY gtp_serve gtp_serve
# The lock constrains the versions; only what the server needs is installed.
RUN pip install --constraint requirements-dev.lock ".[demo]"

FROM python:3.11-slim
RUN useradd --create-home --uid 10001 gtp
COPY --from=build /opt/gtp-serve /opt/gtp-serve
ENV PATH="/opt/gtp-serve/bin:$PATH" PYTHONUNBUFFERED=1
USER gtp
WORKDIR /home/gtp
EXPOSE 30000
ENTRYPOINT ["gtp-serve"]

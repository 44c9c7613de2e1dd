# The gateway: REST and gRPC for clients; neither JAX nor PyTorch.
# Build arguments: BASE_IMAGE, a Python of at least 3.11 on Debian or Ubuntu; PIP_INDEX_URL and PIP_EXTRA_INDEX_URL,
# package indexes of pip.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm
FROM ${BASE_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
RUN python3 -m venv /opt/outrider
COPY pyproject.toml docker/requirements.py ./
RUN python3 requirements.py gateway otel < pyproject.toml > requirements.txt \
    && /opt/outrider/bin/python -m pip install --no-cache-dir -r requirements.txt
COPY outrider ./outrider
COPY gateway ./gateway
RUN /opt/outrider/bin/python -m pip install --no-cache-dir --no-deps .

FROM ${BASE_IMAGE}
RUN useradd --create-home --uid 10001 outrider \
    && install --directory --owner=outrider --group=outrider /home/outrider/.cache \
    && install --directory --owner=outrider --group=outrider --mode=0700 /run/outrider
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH HOME=/home/outrider PYTHONUNBUFFERED=1
USER outrider
WORKDIR /home/outrider
EXPOSE 30000 30001
HEALTHCHECK --interval=5s --timeout=5s --start-period=15m --retries=3 \
    CMD ["outrider", "healthcheck", "http://127.0.0.1:30000"]
ENTRYPOINT ["outrider", "gateway", "--host", "0.0.0.0"]
CMD ["--target", "target:30010", "--draft", "draft:30020"]

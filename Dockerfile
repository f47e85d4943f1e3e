# An image with the four commands and nothing else: no shell, no package manager, no root.
#
#   docker build --tag farside:0.1.0 .
#   docker run --publish 127.0.0.1:7400:7400 farside:0.1.0 kv-server --listen tcp://0.0.0.0:7400 --memory 1GiB
FROM rust:1.93-slim-bookworm AS build
WORKDIR /source
COPY . .
# tests/vm/needs.sh knows what a build with RDMA takes.
# hadolint ignore=DL3008
RUN tests/vm/needs.sh --build \
    && apt-get install --yes --no-install-recommends ibverbs-providers \
    && rm -rf /var/lib/apt/lists/*
RUN . tools/scripts/verbs-env.sh \
    && cargo build --release --locked \
        --bin kv-server --bin kv-cli --bin kv-resp --bin kv-bench \
    && tools/scripts/image-root.sh /image target/release

FROM scratch
COPY --from=build /image /
ENV PATH=/usr/bin FARSIDE_SERVER=tcp://127.0.0.1:7400
USER 65532:65532
EXPOSE 7400 9400
HEALTHCHECK --interval=10s --timeout=10s --start-period=5m CMD ["kv-cli", "ping"]
CMD ["kv-server", "--listen", "tcp://0.0.0.0:7400"]

# rlplug on the CPU:
#   docker build -t rlplug .
#   mkdir -p runs && docker run --rm --user "$(id -u)" -v "$PWD/runs:/home/rlplug/runs" rlplug algo=ppo env=cartpole
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY conf ./conf
COPY rlplug ./rlplug
# torch's CPU build comes from its own index, and is a tenth of the one with CUDA
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu '.[ray,tensorboard,wandb]'

FROM python:3.12-slim
# a C++ compiler, for compile=auto
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /venv /venv
# any --user may write its caches and runs, and has a name
RUN useradd --create-home --uid 1000 rlplug && install -d -m 1777 -o rlplug /home/rlplug /home/rlplug/runs
ENV PATH=/venv/bin:$PATH HOME=/home/rlplug USER=rlplug PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/rlplug
VOLUME /home/rlplug/runs
ENTRYPOINT ["rlplug"]
CMD ["--help"]

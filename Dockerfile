# rlplug on the CPU: docker build -t rlplug . && docker run --rm -v "$PWD/runs:/home/rlplug/runs" rlplug algo=ppo env=cartpole
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
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 rlplug && install -d -o rlplug /home/rlplug/runs
USER 1000
WORKDIR /home/rlplug
VOLUME /home/rlplug/runs
ENTRYPOINT ["rlplug"]
CMD ["--help"]

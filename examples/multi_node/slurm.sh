#!/usr/bin/env bash
# Trains on several nodes with Slurm: vLLM servers on the last nodes of the job, training on the others.
#
#   sbatch --nodes 4 examples/multi_node/slurm.sh examples/train_math.py --dataset_name openai/gsm8k --dataset_config main
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct SERVER_NODES=2 sbatch --nodes 6 examples/multi_node/slurm.sh …
#
# Submit it from the project's root, which must be in a folder that all nodes share, in the environment where dash_trl is
# installed. The arguments are a training script and its flags. docs/howto/several-nodes.md explains networks, ports and
# failures.
#SBATCH --job-name=dash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
SERVER_NODES=${SERVER_NODES:-1}
SERVERS=${SERVERS:-8}     # number of servers on each server node; they share its GPUs equally
PROCESSES=${PROCESSES:-8} # number of training processes on each training node, one per GPU
CONFIG=${CONFIG:-accelerate_configs/ddp.yaml}
OUTPUT=${OUTPUT:-outputs/$SLURM_JOB_ID} # a requeued job has the same number, so it finds its checkpoints there
SERVER_PORT=${SERVER_PORT:-8000}        # port of a node's first server; its other servers use the next ports
TRAIN_PORT=${TRAIN_PORT:-29500}
(($#)) || set -- examples/train_math.py --dataset_name openai/gsm8k --dataset_config main --save_steps 50

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MACHINES=$((${#nodes[@]} - SERVER_NODES))
if ((MACHINES < 1 || SERVER_NODES < 1)); then
  echo "SERVER_NODES=$SERVER_NODES of ${#nodes[@]} nodes: at least one has to serve, and one to train (sbatch --nodes)." >&2
  exit 2
fi
addresses=()
for node in "${nodes[@]}"; do # resolved here: on the node itself, its name may resolve to 127.0.1.1
  read -r address _ < <(getent ahostsv4 "$node")
  addresses+=("$address")
done
HEAD=${addresses[0]}
hosts=("${addresses[@]:MACHINES}")
urls=()
for host in "${hosts[@]}"; do
  for ((i = 0; i < SERVERS; i++)); do urls+=("http://$host:$((SERVER_PORT + i))"); done
done

# The key is passed to the nodes only in the environment: other users may read command lines and logs.
VLLM_API_KEY=${VLLM_API_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export VLLM_API_KEY CONFIG MACHINES PROCESSES HEAD TRAIN_PORT
# torchrun reads this variable. accelerate passes no rendezvous endpoint to it if CONFIG has `same_network: true`.
export PET_RDZV_ENDPOINT=$HEAD:$TRAIN_PORT

LOGS=$OUTPUT/logs
mkdir -p "$LOGS"
resume=()
last=$(find "$OUTPUT" -path '*/checkpoint-*/trainer_state.json' | sort -V | tail -n 1) # last file of a checkpoint
if [ -n "$last" ]; then
  resume=(--resume_from_checkpoint "${last%/*/*}")
  echo "Resuming in ${last%/*/*}"
fi

on_nodes() { # ROLE NODE… -- COMMAND: one task per node; if one fails, Slurm ends the others
  local role=$1 chosen=()
  shift
  while [ "$1" != -- ]; do chosen+=("$1") && shift; done
  exec srun --export=ALL --nodes=${#chosen[@]} --ntasks=${#chosen[@]} --nodelist="$(IFS=,; echo "${chosen[*]}")" \
    --kill-on-bad-exit=1 --open-mode=append --output="$LOGS/$role-%t.log" "${@:2}"
}

on_nodes servers "${nodes[@]:MACHINES}" -- bash -c \
  'exec python -m dash_trl serve "$1" --servers "$2" --port "$3" --host "${@:SLURM_PROCID + 4:1}"' \
  servers "$MODEL" "$SERVERS" "$SERVER_PORT" "${hosts[@]}" &
servers=$!
# Trainers wait 900 s for the servers, longer than `serve` itself waits (600 s): its error message is more helpful.
on_nodes training "${nodes[@]:0:MACHINES}" -- bash -c \
  'exec accelerate launch --config_file "$CONFIG" --num_machines "$MACHINES" --num_processes $((MACHINES * PROCESSES)) \
    --machine_rank "$SLURM_PROCID" --rdzv_backend c10d --rdzv_conf "is_host=$((SLURM_PROCID == 0)),read_timeout=300" \
    --main_process_ip "$HEAD" --main_process_port "$TRAIN_PORT" --deepspeed_multinode_launcher standard "$@"' \
  training "$1" --vllm_server_timeout 900 "${@:2}" --model_name_or_path "$MODEL" --output_dir "$OUTPUT" \
  --vllm_server_urls "${urls[@]}" "${resume[@]}" &
training=$!

wait -n && status=0 || status=$? # exit code of the role that ends first; the other role is ended below
role=training
if kill -0 "$training" 2> /dev/null; then role=servers status=$((status ? status : 1)); fi
kill "$servers" "$training" 2> /dev/null || true
wait
if ((status)); then echo "The job ends: $role ended with exit code $status. Read $LOGS/$role-*.log" >&2; fi
exit "$status"

#!/usr/bin/env bash
# The whole study on Slurm: data, then SFT, reward model, PPO (without and with whitened rewards) and DPO, three sizes,
# four seeds, and samples of each policy. A seed's next stage starts when its stage before has ended well, whatever
# became of the other seeds.
#
#   bash benchmark/submit.sh               submit; prints the jobs
#   bash benchmark/submit.sh --dry-run     print every command and the GPU hours instead: benchmark/commands.md
#
# From the environment, in place of the paper's: SIZES, SEEDS, STAGES; CONFIG, SAMPLES_CONFIG, PROCESSES (of a machine)
# and RESOURCES (flags for sbatch); FLAGS_tldr_dataset, FLAGS_sft, FLAGS_reward, FLAGS_ppo, FLAGS_dpo, FLAGS_samples
# (further flags of a script).
set -feuo pipefail # -f: words of a variable are split at blanks and line ends, and never taken for file names
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

sizes=(${SIZES:-1b 2.8b 6.9b})
seeds=(${SEEDS:-44413 55513 66613 77713})
study="tldr_dataset sft sft_samples reward ppo ppo_samples ppo_whiten ppo_whiten_samples dpo dpo_samples"
stages=(${STAGES:-$study})
training=${CONFIG:-benchmark/accelerate/zero2.yaml}
sampling=${SAMPLES_CONFIG:-benchmark/accelerate/ddp.yaml} # nothing is sharded: nothing is trained
processes=${PROCESSES:-8}
[[ $# == 0 || $* == --dry-run ]] || { echo "error: $*: submit.sh takes --dry-run or nothing" >&2 && exit 1; }
dry_run=${1:+yes}

# What a task takes of the cluster. The time is several times that of benchmark/results/plan.md, which knows arithmetic
# alone. The memory is what plan.md says the machine needs, a quarter more, and 8 GB a process for Python, CUDA and NCCL,
# rounded up to 50 GB.
resources() { # stage, size
    case ${2:-}/$1 in
        /tldr_dataset) echo --cpus-per-task=4 --mem=32G --time=2:00:00 ;;
        */*_samples) echo --gpus-per-node=8 --cpus-per-gpu=4 --mem=350G --time=2:00:00 ;;
        1b/ppo*) echo --gpus-per-node=8 --cpus-per-gpu=4 --mem=150G --time=12:00:00 ;;
        1b/*) echo --gpus-per-node=8 --cpus-per-gpu=4 --mem=150G --time=2:00:00 ;;
        2.8b/ppo*) echo --gpus-per-node=8 --cpus-per-gpu=4 --mem=200G --time=24:00:00 ;;
        2.8b/*) echo --gpus-per-node=8 --cpus-per-gpu=4 --mem=200G --time=4:00:00 ;;
        6.9b/ppo*) echo --gpus-per-node=8 --cpus-per-gpu=4 --mem=650G --time=48:00:00 ;;
        6.9b/*) echo --gpus-per-node=8 --cpus-per-gpu=4 --mem=350G --time=8:00:00 ;;
        *) echo --cpus-per-task=2 --time=4:00:00 ;;
    esac
}

arguments() { # stage, size -> script and flags, {seed} for the seed
    local script=${1%_whiten} name=${2##*/} own= every=500
    local further=FLAGS_$script
    # at most about two hours of work between checkpoints; the other stages take minutes if plan.md is right
    [[ $1 != ppo* ]] || every=250
    case $1 in
        *_samples)
            [[ $1 != ppo* ]] || own="--reward-model-path runs/reward/$name/{seed} --splits validation"
            echo "eval/samples.py runs/${1%_samples}/$name/{seed} $own ${FLAGS_samples:-}"
            return
            ;;
        reward | dpo) own=--run-eval ;;
        ppo_whiten) own="--whiten-rewards --output-dir runs/ppo_whiten/$name/{seed}" ;;
    esac
    echo "$script.py --model $2 --seed {seed} --save-every $every $own ${!further:-}"
}

submit() { # flags for sbatch..., the batch script and its arguments -> job id, or its name in a dry run
    if [[ -z $dry_run ]]; then
        local id
        id=$(sbatch --parsable "$@") || exit 1
        echo "${id%%;*}" # a cluster with a name prints ID;CLUSTER
        return
    fi
    echo "sbatch$(printf ' %q' "$@")" >>"$dry"
    for word in "$@"; do [[ $word != --job-name=* ]] || echo "<${word#*=}>"; done
}

gpu_hours() { # -> a Markdown table: the hours of benchmark/results/plan.md on its 8 GPUs, for every seed
    awk -F ' *[|] *' -v stages="${stages[*]}" -v sizes="${sizes[*]}" -v seeds="${#seeds[@]}" '
        $2 == "stage" { for (i = 3; i < NF; i++) if ($i == "hours") column = i }
        column { hours[$2, $3] = $column * 8 * seeds }
        END {
            n = split(sizes, size, " ")
            head = "| GPU hours |"; rule = "|---|"
            for (j = 1; j <= n; j++) { head = head " " size[j] " |"; rule = rule "---|" }
            print head " all |\n" rule "---|"
            count = split(stages, names, " ")
            for (i = 1; i <= count; i++) {
                plain = names[i]; sub("_whiten$", "", plain); row = "| " names[i] " |"; sum = 0
                for (j = 1; j <= n; j++) {
                    found = hours[plain, size[j]]; sum += found
                    row = row (found ? sprintf(" %.0f |", found) : " unknown |")
                }
                if (plain !~ /_samples$|^tldr_dataset$/) { printf "%s %.0f |\n", row, sum; total += sum }
            }
            for (j = 1; j <= n; j++) blank = blank " |"
            printf "| all |%s %.0f |\n", blank, total
        }' benchmark/results/plan.md
}

dry=$(mktemp)
trap 'rm -f "$dry"' EXIT
if [[ -z $dry_run ]]; then
    source quickstart/setup.sh requirements.txt
    mkdir -p logs # where Slurm writes what a task prints; without the folder it runs none
fi
before() { # the stage that one waits for
    case $1 in
        reward | dpo) echo sft ;;
        ppo | ppo_whiten) echo reward ;;
        *_samples) echo "${1%_samples}" ;;
    esac
}
jobs="" # lines of "stage_size id"; the bash of macOS has no associative arrays
job() { printf '%s' "$jobs" | awk -v name="$1" '$1 == name { print $2 }'; }
[[ -z $dry_run ]] || printf '%s\n\n' '# Commands' 'Every run of the study, as `bash benchmark/submit.sh --dry-run` prints it.'
for stage in "${stages[@]}"; do
    [[ -z $dry_run ]] || printf '## %s\n\n```bash\n' "$stage"
    if [[ $stage == tldr_dataset ]]; then
        flags=(--output-dir data/tldr ${FLAGS_tldr_dataset:-})
        takes=(${RESOURCES:-$(resources "$stage")})
        id=$(
            submit --job-name="$stage" --output=logs/%x_%j.out "${takes[@]}" benchmark/tldr_dataset.sbatch "${flags[@]}"
        )
        jobs+="tldr_dataset $id"$'\n'
        [[ -z $dry_run ]] && echo "$id tldr_dataset" || echo "python tldr_dataset.py ${flags[*]}"
    else
        [[ $stage == *_samples ]] && config=$sampling || config=$training
        for size in "${sizes[@]}"; do
            name=${size##*/}
            flags=($(arguments "$stage" "$size"))
            takes=(${RESOURCES:-$(resources "$stage" "$size")})
            earlier=$(job "$(before "$stage")_$name")
            [[ -z $earlier ]] || takes+=(--dependency="aftercorr:$earlier")
            data=$(job tldr_dataset)
            [[ $stage != sft || -z $data ]] || takes+=(--dependency="afterok:$data")
            id=$(
                submit --job-name="${stage}_$name" --array="0-$((${#seeds[@]} - 1))" --output=logs/%x_%A_%a.out \
                    "${takes[@]}" benchmark/stage.sbatch "$config" "$processes" "${seeds[*]}" "${flags[@]}"
            )
            jobs+="${stage}_$name $id"$'\n'
            [[ -n $dry_run ]] || echo "$id ${stage}_$name"
            for seed in "${seeds[@]}"; do
                [[ -z $dry_run ]] || echo "accelerate launch --config_file $config ${flags[*]//\{seed\}/$seed}"
            done
        done
    fi
    [[ -z $dry_run ]] || printf '```\n\n'
done
[[ -n $dry_run ]] || exit 0
printf '## Slurm\n\n```bash\n%s\n```\n\n' "$(cat "$dry")"
printf '## GPU hours\n\n%s\n\n' "All seeds together, by the arithmetic of benchmark/results/plan.md, from 1b's speed on one H100.
They leave out samples, evaluation, loading, saving and repeated work, so ask for several times as much."
gpu_hours
[[ " ${stages[*]} " != *" ppo_whiten "* ]] || printf '\n%s\n\n```bash\n%s\n```\n' \
    'Whitened rewards (ppo_whiten) are optional and double the hours of PPO. To leave them out:' \
    "STAGES=\"$(printf '%s\n' "${stages[@]}" | grep -v '^ppo_whiten' | xargs)\" bash benchmark/submit.sh"

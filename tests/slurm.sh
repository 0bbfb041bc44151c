#!/usr/bin/env bash
# A Slurm of two pretended machines with four pretended GPUs each, on the loopback of this one, as root:
#
#   bash tests/slurm.sh start DIR && export SLURM_CONF=DIR/slurm.conf
#   bash tests/slurm.sh stop DIR
set -euo pipefail
action=$1 folder=$2 port=${3:-16817}
if [[ $action == stop ]]; then
    for file in "$folder"/slurm*.pid; do [[ ! -f $file ]] || kill "$(cat "$file")"; done
    exit
fi
host=$(hostname -s)
mkdir -p "$folder"/{state,spool,log,dev}
cat >"$folder/slurm.conf" <<END
ClusterName=loop
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$port
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/log/jobcomp.txt
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
ReturnToService=2
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=5
MinJobAge=3600
PropagateResourceLimits=NONE
GresTypes=gpu
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname=$host Port=$((port + 1)) CPUs=4 RealMemory=16000 Gres=gpu:4 State=UNKNOWN
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname=$host Port=$((port + 2)) CPUs=4 RealMemory=16000 Gres=gpu:4 State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=7-0 State=UP
END
for i in 0 1 2 3; do [[ -e $folder/dev/nvidia$i ]] || mknod "$folder/dev/nvidia$i" c 1 3; done
echo "Name=gpu Flags=nvidia_gpu_env File=$folder/dev/nvidia[0-3]" >"$folder/gres.conf"
export SLURM_CONF=$folder/slurm.conf
slurmctld -f "$SLURM_CONF"
for node in n1 n2; do slurmd -f "$SLURM_CONF" -N "$node"; done
for _ in $(seq 60); do [[ $(sinfo -h -o %T 2>/dev/null) != idle ]] || exit 0; sleep 0.5; done
echo "error: no idle nodes after 30 s; see $folder/log" >&2
exit 1

#!/usr/bin/env bash
# Jobs on a Slurm cluster of two nodes, both of them this machine. Argument: the bin folder of a venv with MPICH.
# The configuration claims two GPUs per node: Slurm assigns them to jobs, which do not find them.
# All files of this cluster are in one temporary folder; a cluster that this machine belongs to is not touched.

. "$(dirname "$0")/common.sh"
needs "munge slurm-wlm slurm-wlm-basic-plugins" munged slurmctld slurmd srun
# A killed MPICH leaves files in /dev/shm: the script goes on with one of its own.
[ "${2:-}" ] || exec unshare --mount tests/clusters/slurm.sh "$bin" again
mount -t tmpfs tmpfs /dev/shm

dir=$(mktemp --directory)
chmod 755 "$dir" # munge insists
export SLURM_CONF=$dir/slurm.conf # in the environment of all daemons and jobs, by which `processes` finds them

processes() { (grep -lszxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ || true) | cut --delimiter=/ --fields=3; }
ranks() { # [NUMBER]
    processes | while read -r pid; do
        if grep -qszxE "SLURM_PROCID=${1:-.*}" "/proc/$pid/environ"; then echo "$pid"; fi
    done
}
no_ranks() { [ -z "$(ranks)" ]; }
both_idle() { [ "$(sinfo --noheader --partition=low --states=idle --format=%D)" = 2 ]; }

clean() {
    local code=$?
    if [ $code != 0 ]; then tail --lines=5 "$dir"/*.log; fi
    exec 2> /dev/null # hides the shell's messages about killed processes
    processes | xargs --no-run-if-empty kill -KILL || true
    wait
    rm -rf "$dir"
}
trap clean EXIT

cat > "$SLURM_CONF" << END
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=17000
SlurmctldPidFile=$dir/slurmctld.pid
StateSaveLocation=$dir/state
SlurmdPidFile=$dir/%n.pid
SlurmdSpoolDir=$dir/%n
SlurmdParameters=config_overrides
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge,cred_expire=10
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1
MailProg=/bin/true
GresTypes=gpu
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17001 CPUs=2 Gres=gpu:2
NodeName=n2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17002 CPUs=2 Gres=gpu:2
PartitionName=low Nodes=n1,n2 PriorityTier=1 GraceTime=60 Default=YES
PartitionName=high Nodes=n1,n2 PriorityTier=2
END
echo "Name=gpu File=$dir/gpu[0-1]" > "$dir/gres.conf"
touch "$dir"/gpu{0,1}
mkdir "$dir"/{state,n1,n2}
(umask 077 && head --bytes=128 /dev/urandom > "$dir/key")
munged --foreground --socket="$dir/munge" --key-file="$dir/key" --seed-file="$dir/seed" \
    --log-file="$dir/munged.log" --pid-file="$dir/munged.pid" 2> /dev/null &
await 10 test -S "$dir/munge" || fail "munged does not start"
slurmctld -D &> "$dir/slurmctld.log" &
slurmd -D -N n1 &> "$dir/n1.log" &
slurmd -D -N n2 &> "$dir/n2.log" &
await 30 both_idle || fail "Slurm does not start"

echo "== srun: 4 ranks on 2 nodes"
timeout 180 srun -K1 --mpi=pmi2 -N2 -n4 "$bin/python" "${train[@]}" --steps 5 --verify

echo "== srun: a rank is killed"
srun -K1 --mpi=pmi2 -N2 -n4 "$bin/python" "${train[@]}" --steps 100000 &> "$dir/killed.log" &
srun=$!
await 180 grep -q "^step 1/" "$dir/killed.log" || fail "the ranks do not start"
kill -KILL "$(ranks 2 | xargs ps --format=pid=,args= --pid | awk '/ -m mpirun / { print $1 }')" # and not its watchdog
begin=$(now)
await 60 ended $srun || fail "srun is still there 60 s after a rank was killed"
code=0
wait $srun || code=$?
echo "srun ended with code $code after $(since "$begin") s"
[ $code != 0 ] || fail "srun ended well"
await 5 no_ranks || fail "processes are left: $(ranks | xargs ps --format=pid,args --pid)"

echo "== sbatch: the example, at its time limit, pre-empted, and to its end"
job=$(VENV=$(dirname "$bin") sbatch --parsable --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-task=0 \
    --output="$dir/job.log" mpirun/cli/slurm.sbatch "${train[@]:2}" --steps 300 --save "$dir/saved" --resume "$dir/saved")
steps() { grep --count "^step " "$dir/job.log"; }
more_steps() { [ "$(steps)" -gt "$1" ]; }
requeued() { [[ $(scontrol show job "$job") == *JobState=PENDING*Restarts=$1* ]]; }
completed() { [[ $(scontrol show job "$job") == *JobState=COMPLETED* ]]; }
await 180 more_steps 0 || fail "the ranks do not start"
scancel --batch --signal=USR1 "$job" # what Slurm does when the limit is near
await 180 requeued 1 || fail "the job is not in the queue again"
await 180 more_steps "$(steps)" || fail "the ranks do not start again" # a requeued job waits for cred_expire
timeout 180 srun --partition=high -N2 -n4 true
await 180 requeued 2 || fail "the pre-empted job is not in the queue again"
await 180 completed || fail "the job does not complete"
cat "$dir/job.log"
[ "$(grep --count "^step 1/300 " "$dir/job.log")" = 1 ] || fail "the job began from scratch again"
[ "$(grep --count "^step 300/300 " "$dir/job.log")" = 1 ] || fail "the job ended before its last step"

echo "== sbatch: the example for GPUs"
gpus() { # NUMBER OPTION...: of a node
    VENV=$(dirname "$bin") timeout 300 sbatch --time=30 \
        --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-node="$1" "${@:2}" \
        mpirun/cli/slurm-gpu.sbatch "${train[@]:2}" --steps 3
}
for fabric in "" ucx cray wheel; do FABRIC=$fabric gpus 2 --test-only; done
if gpus 3 --test-only 2> /dev/null; then fail "a job of more GPUs than there are is accepted"; fi
refused() { # SENTENCE: the last job's, whose settings are wrong
    grep --quiet "$1" "$dir/refused.log" || fail "a job with wrong settings says $(cat "$dir/refused.log")"
}
FABRIC=crey gpus 2 --wait --output="$dir/refused.log" && fail "a job of an unknown FABRIC runs"
refused "^FABRIC=crey, but should be ucx, cray or wheel$"
FABRIC=cray gpus 2 --wait --output="$dir/refused.log" && fail "a job runs without Cray's MPICH"
refused "FABRIC=cray: load the module cray-mpich"
export CRAY_MPICH_ROOTDIR=$dir/cray
FABRIC=cray gpus 2 --wait --output="$dir/refused.log" && fail "a job runs without Cray's library for GPUs"
refused "^FABRIC=cray: there is no $dir/cray/gtl/lib/libmpi_gtl_cuda.so$"
mkdir --parents "$dir/cray/gtl/lib"
cp "$(ldconfig -p | awk '/libdl\.so\.2/ { print $NF; exit }')" "$dir/cray/gtl/lib/libmpi_gtl_cuda.so" # it does nothing
FABRIC=cray gpus 2 --wait --output="$dir/cray.log" || fail "the job fails: $(cat "$dir/cray.log")"
cat "$dir/cray.log"
grep --quiet "^step 3/3 " "$dir/cray.log" || fail "the job for Cray's MPICH does not come to its last step"
if grep "cannot be preloaded" "$dir/cray.log"; then fail "ranks do not load the library for GPUs"; fi
mkdir "$dir/stand-in"
printf '#!/bin/sh\necho "$SLURMD_NODENAME" >> %s\nexec sleep 600\n' "$dir/mps" > "$dir/stand-in/nvidia-cuda-mps-control"
chmod +x "$dir/stand-in/nvidia-cuda-mps-control"
PATH=$dir/stand-in:$PATH FABRIC=wheel MPS=1 gpus 2 --wait --output="$dir/gpus.log" ||
    fail "the job fails: $(cat "$dir/gpus.log")"
cat "$dir/gpus.log"
[ "$(sort "$dir/mps" | xargs)" = "n1 n2" ] || fail "the service of GPUs was not started once a node"

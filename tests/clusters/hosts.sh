#!/usr/bin/env bash
# Ranks on two hosts: network namespaces of this machine, joined by a link of 1 Gbit/s, which is cut in the end.
# Argument: the bin folder of a venv with MPICH.

. "$(dirname "$0")/common.sh"
needs iproute2 ip tc

net=mpirun-$$ # the hosts are mpirun-PID-1 and -2, with the addresses 10.77.0.1 and .2
dir=$(mktemp --directory)

pids() { for host in 1 2; do ip netns pids $net-$host; done; }
ranks() { pids | xargs --no-run-if-empty ps --format=comm= --pid | grep ^python || true; }
no_ranks() { [ -z "$(ranks)" ]; }

clean() {
    exec 2> /dev/null # hides the shell's messages about killed processes
    pids | xargs --no-run-if-empty kill -KILL || true
    wait
    for host in 1 2; do ip netns delete $net-$host 2> /dev/null || true; done # and the link with them
    rm -rf "$dir"
}
trap clean EXIT

for host in 1 2; do ip netns add $net-$host; done
ip link add eth netns $net-1 type veth peer name eth netns $net-2
for host in 1 2; do
    ip -n $net-$host address add 10.77.0.$host/24 dev eth
    ip -n $net-$host link set lo up
    ip -n $net-$host link set eth up
    tc -n $net-$host qdisc add dev eth root tbf rate 1gbit burst 256kb latency 50ms
done

# on HOST COMMAND
cat > "$dir/on" << END
#!/bin/sh
host=\$1
shift
exec ip netns exec $net-\$host unshare --uts --ipc sh -c "hostname host\$host; mount -t tmpfs tmpfs /dev/shm; \$*"
END
# ssh [OPTION]... ADDRESS COMMAND. Like ssh, it does not notice the end of a command while the link is cut.
cat > "$dir/ssh" << END
#!/bin/sh
while [ "\${1#-}" != "\$1" ]; do shift; done
host=\${1##*.}
shift
$dir/on \$host "\$*"
code=\$?
until ip -n $net-\$host link show eth | grep -q LOWER_UP; do sleep 0.1; done
exit \$code
END
chmod +x "$dir/on" "$dir/ssh"

# Else UCX would use shared memory: it takes the two hosts for one machine.
launch() { # OPTIONS OF MPIRUN
    UCX_TLS=tcp,self "$dir/on" 1 "exec $bin/mpiexec -launcher ssh -launcher-exec $dir/ssh \
        -hosts 10.77.0.1,10.77.0.2 -ppn 2 -n 4 $bin/python ${train[*]} $*"
}

is_up() { ip -n $net-$1 link show eth | grep -q "state UP"; } # the kernel takes up to a second: UCX skips it until then
for host in 1 2; do await 10 is_up $host || fail "the link does not come up"; done

echo "== 4 ranks on 2 hosts"
launch --steps 5 --verify
echo "$(ip netns exec $net-2 cat /sys/class/net/eth/statistics/rx_bytes) bytes went from host 1 to host 2"

echo "== the link is cut"
launch --steps 300 --timeout 10 &> "$dir/log" &
mpiexec=$!
await 180 grep -q "^step 1/" "$dir/log" || fail "the ranks do not start: $(cat "$dir/log")"
ip -n $net-2 link set eth down
begin=$(now)
await 60 no_ranks || fail "ranks are still there 60 s after the cut: $(ranks | wc --lines); $(cat "$dir/log")"
echo "the ranks of both hosts have ended $(since "$begin") s after the cut"
await 10 ended $mpiexec || fail "mpiexec does not end: $(cat "$dir/log")"
code=0
wait $mpiexec || code=$?
echo "mpiexec has ended with code $code, $(since "$begin") s after the cut"
[ $code != 0 ] || fail "mpiexec ended well"
cat "$dir/log"

#!/bin/busybox sh
# Init of a guest: configures the network and the rxe adapter, then serves commands.
/bin/busybox --install -s /bin
export PATH=/bin:/usr/bin:/sbin:/usr/sbin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
ulimit -l unlimited
for module in $(cat /modules/order); do
    insmod "/modules/$module" || echo "no module $module"
done
for word in $(cat /proc/cmdline); do
    case "$word" in guest=*) number=${word#guest=} ;; esac
done
ip link set lo up
echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad
ip link set eth0 up
ip address add "10.77.0.$number/24" dev eth0
ip address add "fd77::$number/64" dev eth0
rdma link add rxe0 type rxe netdev eth0
until [ -e /dev/infiniband/uverbs0 ]; do sleep 0.05; done
nc -ll -p 77 -e /serve &
until /listens 77; do sleep 0.05; done
echo "guest $number: $(uname -r) ready"
while :; do wait; sleep 1; done

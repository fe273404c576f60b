use super::*;
use crate::safety::describe;
use crate::safety::fixture::Tree;

const DISK: DeviceNumber = (259, 3);

/// A host with a disk and one partition, process 1 and a shell, and nothing that uses the disk.
fn host() -> Tree {
    let tree = Tree::new();
    tree.file("/proc/swaps", "Filename Type Size Used Priority\n");
    tree.file("/proc/self/status", "CapEff:\t000001ffffffffff\n");
    tree.link("/proc/self/ns/pid", FIRST_PID_NAMESPACE);
    tree.block("/dev/ublkb0", DISK);
    tree.block("/dev/ublkb0p1", (259, 4));
    tree.block("/dev/vda", (254, 0));
    tree.file("/sys/block/ublkb0/dev", "259:3\n");
    tree.file("/sys/block/ublkb0/ublkb0p1/dev", "259:4\n");
    tree.file("/sys/block/ublkb0/ublkb0p1/partition", "1\n");
    tree.directory("/sys/block/ublkb0/holders");
    process(
        &tree,
        1,
        "systemd",
        "mnt:[1]",
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n",
    );
    process(
        &tree,
        50,
        "bash",
        "mnt:[1]",
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n",
    );
    tree.link("/proc/50/fd/0", "/dev/tty1");
    tree
}

fn process(tree: &Tree, pid: i32, comm: &str, namespace: &str, mountinfo: &str) {
    tree.file(&format!("/proc/{pid}/comm"), &format!("{comm}\n"));
    tree.file(&format!("/proc/{pid}/mountinfo"), mountinfo);
    tree.link(&format!("/proc/{pid}/ns/mnt"), namespace);
    tree.link(&format!("/proc/{pid}/root"), "/");
    tree.directory(&format!("/proc/{pid}/fd"));
}

fn open(tree: &Tree, pid: i32, fd: u32, node: &str, flags: &str) {
    tree.link(&format!("/proc/{pid}/fd/{fd}"), tree.root().path(node));
    tree.file(
        &format!("/proc/{pid}/fdinfo/{fd}"),
        &format!("pos:\t0\nflags:\t{flags}\nmnt_id:\t1\n"),
    );
}

fn look(tree: &Tree) -> Survey {
    survey(&tree.root(), DISK, "ublkb0", &[]).unwrap()
}

#[test]
fn a_disk_nobody_uses() {
    let found = look(&host());
    assert_eq!(found, Survey::default());
    assert!(found.is_free());
    assert_eq!(describe(&found.holders), "nobody");
}

#[test]
fn everybody_at_once_in_one_sentence() {
    let tree = host();
    tree.file(
        "/proc/swaps",
        "Filename Type Size Used Priority\n/dev/vda partition 1 0 -2\n\
         /dev/ublkb0 partition 4194300 38092 100\n",
    );
    process(
        &tree,
        7,
        "nginx",
        "mnt:[2]",
        "90 80 259:3 / /mnt/x rw - ext4 /dev/ublkb0 rw\n",
    );
    tree.file(
        "/proc/1/mountinfo",
        "40 27 259:3 / /mnt/x rw - ext4 /dev/ublkb0 rw\n",
    );
    process(
        &tree,
        60,
        "sh",
        "mnt:[3]",
        "95 80 259:4 / /sandbox rw - ext4 /dev/ublkb0p1 rw\n",
    );
    tree.directory("/sys/block/ublkb0/holders/dm-0");
    tree.file("/sys/block/dm-0/dm/name", "fast\n");
    tree.directory("/sys/block/ublkb0/ublkb0p1/holders/md0");
    tree.file("/sys/block/loop3/loop/backing_file", "/dev/ublkb0\n");
    tree.file("/sys/block/loop4/loop/backing_file", "/home/image\n");
    tree.file("/sys/block/zram0/backing_dev", "none\n");
    process(&tree, 812, "fio", "mnt:[1]", "");
    open(&tree, 812, 5, "/dev/ublkb0", "0140002");
    open(&tree, 812, 6, "/dev/ublkb0p1", "0140002");
    open(&tree, 812, 7, "/dev/vda", "0140002");
    let found = look(&tree);
    assert_eq!(found.blind, Vec::<String>::new());
    assert_eq!(
        found.holders,
        [
            Holder::Swap {
                path: "/dev/ublkb0".into(),
                used: 38092 << 10,
                ghost: false
            },
            Holder::Mount {
                dir: "/mnt/x".into(),
                pid: 1,
                other_namespace: false
            },
            Holder::Mount {
                dir: "/mnt/x".into(),
                pid: 7,
                other_namespace: true
            },
            Holder::Mount {
                dir: "/sandbox".into(),
                pid: 60,
                other_namespace: true
            },
            Holder::Stacked {
                kname: "dm-0".into(),
                name: Some("fast".into())
            },
            Holder::Stacked {
                kname: "md0".into(),
                name: None
            },
            Holder::Stacked {
                kname: "loop3".into(),
                name: None
            },
            Holder::Process {
                pid: 812,
                comm: "fio".into(),
                fds: 2
            },
        ]
    );
    assert_eq!(
        describe(&found.holders),
        "swap (37.2M used), mounted on /mnt/x (also for pid 7), /sandbox in the mount \
         namespace of pid 60, held by dm-0 (fast), md0, loop3, open by fio (pid 812, 2 times)"
    );
}

#[test]
fn a_ghost_holds_the_name() {
    let tree = host();
    tree.file(
        "/proc/swaps",
        "/dev/ublkb0\\040(deleted) partition 4194300 38092 100\n",
    );
    let found = look(&tree);
    assert_eq!(
        found.holders,
        [Holder::Swap {
            path: "/dev/ublkb0".into(),
            used: 38092 << 10,
            ghost: true
        }]
    );
    assert_eq!(
        describe(&found.holders),
        "swap whose device node is gone (/dev/ublkb0 (deleted), 37.2M used)"
    );
}

#[test]
fn skipped_processes_and_o_path_do_not_count() {
    let tree = host();
    for (pid, flags) in [(300, "02"), (301, "010000000"), (302, "0100000")] {
        process(&tree, pid, "x", "mnt:[1]", "");
        open(&tree, pid, 3, "/dev/ublkb0", flags);
    }
    let found = survey(&tree.root(), DISK, "ublkb0", &[300]).unwrap();
    assert_eq!(
        found.holders,
        [Holder::Process {
            pid: 302,
            comm: "x".into(),
            fds: 1
        }]
    );
}

#[test]
fn a_btrfs_over_several_disks_has_no_number_to_go_by() {
    let tree = host();
    tree.file(
        "/proc/1/mountinfo",
        "40 27 0:45 / /srv rw - btrfs /dev/vda rw\n",
    );
    tree.link(
        "/sys/fs/btrfs/d2c9/devices/ublkb0",
        "../../../../block/ublkb0",
    );
    assert_eq!(describe(&look(&tree).holders), "held by btrfs (d2c9)");
}

#[test]
fn mounts_are_found_where_namespaces_are_not_readable() {
    let tree = host();
    for pid in [1, 50] {
        std::fs::remove_file(tree.root().path(format!("/proc/{pid}/ns/mnt"))).unwrap();
    }
    tree.file(
        "/proc/50/mountinfo",
        "40 27 259:3 / /mnt rw - ext4 /dev/ublkb0 rw\n",
    );
    tree.file(
        "/proc/1/mountinfo",
        "40 27 259:3 / /mnt rw - ext4 /dev/ublkb0 rw\n",
    );
    assert_eq!(
        look(&tree).holders,
        [Holder::Mount {
            dir: "/mnt".into(),
            pid: 1,
            other_namespace: false
        }]
    );
}

#[test]
fn a_process_that_ends_does_not_hide_its_namespace() {
    let tree = host();
    process(&tree, 40, "zombie", "mnt:[2]", "");
    std::fs::remove_file(tree.root().path("/proc/40/mountinfo")).unwrap();
    process(
        &tree,
        41,
        "sh",
        "mnt:[2]",
        "40 27 259:3 / /mnt rw - ext4 /dev/ublkb0 rw\n",
    );
    assert_eq!(
        look(&tree).holders,
        [Holder::Mount {
            dir: "/mnt".into(),
            pid: 41,
            other_namespace: true
        }]
    );
}

#[test]
fn a_chrooted_process_does_not_speak_for_its_namespace() {
    let tree = host();
    process(&tree, 40, "postfix", "mnt:[2]", "");
    std::fs::remove_file(tree.root().path("/proc/40/root")).unwrap();
    tree.link("/proc/40/root", "/var/spool/postfix");
    process(
        &tree,
        41,
        "sh",
        "mnt:[2]",
        "40 27 259:3 / /mnt rw - ext4 /dev/ublkb0 rw\n",
    );
    assert_eq!(
        look(&tree).holders,
        [Holder::Mount {
            dir: "/mnt".into(),
            pid: 41,
            other_namespace: true
        }]
    );
}

#[test]
fn what_cannot_be_seen_is_said() {
    let tree = host();
    std::fs::remove_file(tree.root().path("/proc/self/ns/pid")).unwrap();
    tree.link("/proc/self/ns/pid", "pid:[4026532200]");
    tree.file("/proc/self/status", "CapEff:\t0000000000000000\n");
    tree.file(
        "/proc/self/mountinfo",
        "22 1 0:21 / /proc rw - proc proc rw,hidepid=2\n",
    );
    let found = look(&tree);
    assert_eq!(found.blind.len(), 2, "{found:?}");
    assert!(found.blind[0].contains("PID namespace"), "{found:?}");
    assert!(found.blind[1].contains("hidepid=2"), "{found:?}");
}

#[test]
fn a_deleted_swap_device_of_another_name_is_not_passed_over() {
    let tree = host();
    tree.file(
        "/proc/swaps",
        "/dev/mine\\040(deleted) partition 4194300 0 1\n",
    );
    let found = look(&tree);
    assert!(found.is_free());
    assert!(found.blind[0].contains("/dev/mine is gone"), "{found:?}");
}

#[test]
fn without_proc_nothing_is_known() {
    assert!(holders(&Tree::new().root(), DISK, "ublkb0", &[]).is_err());
    let tree = Tree::new();
    tree.file("/proc/swaps", "Filename Type Size Used Priority\n");
    assert!(
        holders(&tree.root(), DISK, "ublkb0", &[])
            .unwrap_err()
            .message
            .contains("/proc")
    );
}

#[test]
fn this_machine() {
    // Whatever the root filesystem is on is mounted, and seen through process 1 or ourselves.
    let root = Root::default();
    let mounts = read_mounts(&root, "self").unwrap();
    let disk = mounts
        .iter()
        .find(|m| m.mount_point == Path::new("/"))
        .unwrap();
    let found = holders(&root, disk.dev, "no-such-name", &[]).unwrap();
    let mounted = |h: &Holder| matches!(h, Holder::Mount { dir, .. } if dir == Path::new("/"));
    // A root on tmpfs, overlay or btrfs has no device number to look for.
    assert!(
        disk.dev.0 == 0 || found.holders.iter().any(mounted),
        "{found:?}"
    );
}

// SPDX-License-Identifier: Apache-2.0
//! Files are opened in /proc, and from `use_instance` on below another root. In one test: the root is the
//! process's.
use std::fs::{create_dir_all, remove_dir_all, write, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::Path;

use sonde_procfs::{open, open_with, read, read_link, use_instance};

#[test]
fn paths_of_proc_are_looked_up_below_the_instance_and_no_others() {
    let own = format!("{}\n", std::process::id());
    let status = String::from_utf8(read("/proc/self/status").unwrap()).unwrap();
    assert!(status.contains(&format!("Pid:\t{own}")));
    assert_eq!(read_link("/proc/self").unwrap(), Path::new(own.trim()));

    let root = std::env::temp_dir().join(format!("sonde-procfs-{}", std::process::id()));
    create_dir_all(root.join("7")).unwrap();
    write(root.join("7/status"), "of the instance").unwrap();
    symlink("7", root.join("self")).unwrap();
    write(root.join("beside"), "a file").unwrap();
    let instance = File::open(&root).unwrap();
    use_instance(instance.as_raw_fd());

    assert_eq!(read("/proc/self/status").unwrap(), b"of the instance");
    assert_eq!(read_link("/proc/self").unwrap(), Path::new("7"));
    assert!(open("/proc/1/status").is_err());
    assert!(open_with("/proc", libc::O_PATH | libc::O_DIRECTORY).is_ok());
    assert!(open_with("/proc/7", libc::O_PATH | libc::O_DIRECTORY).is_ok());
    assert_eq!(read(root.join("beside")).unwrap(), b"a file");
    assert!(open("/proc/7/\0").is_err());
    assert!(read("/procs/7").is_err());
    remove_dir_all(root).unwrap();
}

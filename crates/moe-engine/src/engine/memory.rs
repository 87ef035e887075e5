//! How much memory this process may still use: what the machine has, and what its control groups (containers, jobs)
//! allow.

use std::fs;
use std::path::Path;

use crate::error::Result;
#[cfg(any(test, feature = "cuda"))]
use crate::error::ensure;
use model_runtime::Exec;

/// Bytes that are free on the device of `ex`. A GPU is treated as if it had `gpu_memory` bytes, if that is less than
/// its memory.
///
/// # Errors
/// More than `gpu_memory` bytes are in use.
pub(crate) fn available(ex: &Exec, gpu_memory: Option<u64>) -> Result<Option<u64>> {
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let (free, total) = ex.device_memory()?;
        return free_of(free as u64, total as u64, gpu_memory).map(Some);
    }
    let _ = (ex, gpu_memory);
    Ok(host())
}

/// The free bytes of a GPU with `total` bytes if it had only `limit` bytes.
#[cfg(any(test, feature = "cuda"))]
fn free_of(free: u64, total: u64, limit: Option<u64>) -> Result<u64> {
    let used = total.saturating_sub(free);
    let limit = limit.unwrap_or(total).min(total);
    ensure!(
        used < limit,
        "`gpu_memory` {limit}: {used} bytes of the GPU are in use already, by the weights and whatever else runs there; allow \
         more, keep experts in host memory (`expert_offload`), or take a smaller or a quantised model"
    );
    Ok(limit - used)
}

/// Bytes of host memory that can be used without swapping or being killed; `None` if the system does not report it.
pub fn host() -> Option<u64> {
    let machine = machine(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(machine.min(allowed(&groups, Path::new("/sys/fs/cgroup"))))
}

/// The estimate of Linux.
fn machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The remainder of the tightest limit among the control groups in `/proc/self/cgroup`, version 1 or 2. A container may
/// not see its own path, only its group as the root, so all ancestors are checked.
fn allowed(groups: &str, root: &Path) -> u64 {
    let mut least = u64::MAX;
    for group in groups.lines() {
        let mut fields = group.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, limit, usage) = match controllers {
            "" => (root.to_path_buf(), "memory.max", "memory.current"),
            "memory" => (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
            _ => continue,
        };
        for path in Path::new(path.trim_start_matches('/')).ancestors() {
            least = least.min(left(&root.join(path), limit, usage).unwrap_or(u64::MAX));
        }
    }
    least
}

/// The memory that one group may still use. Cached files that were not used for a while count as free.
fn left(group: &Path, limit: &str, usage: &str) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = number(limit)?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse::<u64>().ok());
    Some(limit.saturating_sub(number(usage)?.saturating_sub(cached.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_says_what_is_available() {
        assert_eq!(machine("MemTotal: 9 kB\nMemAvailable:   23 kB\n"), Some(23 << 10));
        assert_eq!(machine("MemTotal: 9 kB\n"), None);
        #[cfg(target_os = "linux")]
        assert!(host().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn a_smaller_gpu_has_less_left() {
        assert_eq!(free_of(90, 100, None).unwrap(), 90);
        assert_eq!(free_of(90, 100, Some(24)).unwrap(), 14);
        assert_eq!(free_of(90, 100, Some(200)).unwrap(), 90);
        let e = free_of(70, 100, Some(24)).unwrap_err().to_string();
        assert!(e.starts_with("`gpu_memory` 24: 30 bytes"), "{e}");
    }

    #[test]
    fn the_tightest_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let allowed = |groups| allowed(groups, root.path());
        assert_eq!(allowed("0::/a/b\n4:memory:/a\nnonsense\n"), u64::MAX, "no limit is set");
        write("a/b/memory.max", "max\n");
        write("a/b/memory.current", "70\n");
        write("a/memory.max", "1000\n");
        write("a/memory.current", "300\n");
        write("a/memory.stat", "active_file 5\ninactive_file 100\n");
        assert_eq!(allowed("0::/a/b\n"), 800, "of the parent, without its cached files");
        // Version 1 in a container, which sees its group as the root.
        write("memory/memory.limit_in_bytes", "500\n");
        write("memory/memory.usage_in_bytes", "600\n");
        assert_eq!(allowed("3:cpu:/x\n4:memory:/docker/123\n0::/a/b\n"), 0);
    }
}

//! Parts of NCCL that cudarc's bindings leave to the caller: the version, the text of errors, the configuration.

use std::ffi::{CStr, c_char, c_int};
use std::mem::offset_of;
use std::sync::OnceLock;

use candle_core::cuda_backend::cudarc::nccl::sys;
use candle_core::{Error, Result};

/// The oldest version with everything that is used here (communicators that can be split). The layout of the
/// configuration and of the functions has not changed since.
const OLDEST: c_int = 21800;

/// With this configuration calls return at once, with `ncclInProgress` if work remains. Without it a rank that waits
/// for others inside the library could not be aborted. All other fields keep the library's defaults.
pub(super) fn non_blocking() -> sys::ncclConfig_t {
    const MAGIC: u32 = 0xcafe_beef;
    const UNDEFINED: c_int = c_int::MIN;
    // SAFETY: numbers and a pointer, of which zero is a value.
    let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
    // Fields that a newer header adds come after this part; the library reads only this part.
    config.size = (offset_of!(sys::ncclConfig_t, splitShare) + size_of::<c_int>()).next_multiple_of(8);
    (config.magic, config.version) = (MAGIC, OLDEST as u32);
    config.blocking = 0;
    (config.cgaClusterSize, config.minCTAs, config.maxCTAs) = (UNDEFINED, UNDEFINED, UNDEFINED);
    config.splitShare = UNDEFINED;
    config
}

/// The library's version, such as "2.28.9".
///
/// # Errors
/// A library that is too old. The result of the first call is kept.
pub(super) fn version() -> Result<&'static str> {
    static VERSION: OnceLock<std::result::Result<String, String>> = OnceLock::new();
    match VERSION.get_or_init(checked_version) {
        Ok(version) => Ok(version),
        Err(e) => Err(Error::msg(e)),
    }
}

fn checked_version() -> std::result::Result<String, String> {
    let mut version = 0;
    // SAFETY: writes one number.
    let code = unsafe { sys::ncclGetVersion(&mut version) };
    if code != sys::ncclResult_t::ncclSuccess {
        return Err(format!("NCCL cannot be used: {}", explain(code, std::ptr::null_mut())));
    }
    usable(version)
}

/// The version as text, or an error if it is too old.
fn usable(version: c_int) -> std::result::Result<String, String> {
    let text = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    if version < OLDEST {
        return Err(format!(
            "NCCL cannot be used: libnccl.so.2 is {text}; install 2.18 or newer for this CUDA (libnccl2, or pip's \
             nvidia-nccl-cu13) and name its folder in LD_LIBRARY_PATH"
        ));
    }
    Ok(text)
}

/// The meaning of an error code, with the library's last message. `comm` is null or alive.
pub(super) fn explain(code: sys::ncclResult_t, comm: sys::ncclComm_t) -> String {
    // SAFETY: both return null or a null-terminated string that the library owns; it is copied at once.
    let (what, last) = unsafe { (text(sys::ncclGetErrorString(code)), text(sys::ncclGetLastError(comm))) };
    if last.is_empty() { what } else { format!("{what} ({last})") }
}

/// A copy of a C string; empty for null.
///
/// # Safety
/// `text` is null or points to a null-terminated string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_library_says_what_to_do() {
        let e = usable(21_705).unwrap_err();
        for part in ["2.17.5", "2.18", "LD_LIBRARY_PATH"] {
            assert!(e.contains(part), "{e}");
        }
        assert_eq!(usable(22_809).as_deref(), Ok("2.28.9"));
    }

    /// This test needs the NCCL library, as every test with ranks on GPUs does.
    #[test]
    fn the_linked_library_answers() {
        assert!(version().is_ok_and(|version| version.starts_with("2.")));
        let text = explain(sys::ncclResult_t::ncclInvalidArgument, std::ptr::null_mut());
        assert_eq!(text.split(" (").next(), Some("invalid argument"));
    }

    #[test]
    fn the_configuration_is_that_of_the_oldest_header() {
        let config = non_blocking();
        assert_eq!((config.size, config.version, config.blocking), (48, 21_800, 0));
        assert!(config.netName.is_null() && config.splitShare == c_int::MIN);
    }
}

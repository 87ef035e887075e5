//! libnccl.so.2, opened when the first communicator is made.
//!
//! It is opened at run time because candle links CUDA's libraries: with NCCL among them, no
//! program of this build would start on a machine without NCCL, not even on one GPU. The
//! declarations are those of nccl.h, of which this crate needs few; their layout has been the
//! same since NCCL 2.18.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use candle_core::{Error, Result};
use libloading::Library as SharedObject;

/// What the dynamic loader is asked for.
const SONAME: &str = "libnccl.so.2";

/// The oldest version with everything that is used here (communicators that can be split).
const OLDEST: c_int = 21800;

/// ncclResult_t.
pub(super) type Code = c_int;
pub(super) const SUCCESS: Code = 0;
pub(super) const IN_PROGRESS: Code = 7;

/// What ncclComm_t points at.
#[repr(C)]
pub(super) struct RawComm {
    _opaque: [u8; 0],
}

/// ncclUniqueId.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub [u8; 128]);

/// ncclConfig_t as of NCCL 2.18; newer libraries take what it lacks from their defaults.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls return at once, with `IN_PROGRESS` where something remains to be done: only so can a
    /// rank that waits for others inside the library be aborted. The rest is the library's choice.
    pub(super) fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// Declares the functions of the library by their C signatures.
macro_rules! library {
    ($($name:ident = $symbol:literal ($($arg:ty),*) -> $result:ty;)*) => {
        /// The functions of the library.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> $result,)*
            /// Keeps the functions loaded.
            _object: SharedObject,
        }

        impl Library {
            fn load(name: &str) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: loading runs the initialisers of NCCL, as starting a program linked with it would; each
                // function has the signature of nccl.h, which no version 2 has changed.
                unsafe {
                    let object = SharedObject::new(name)?;
                    Ok(Self {
                        $($name: *object.get(concat!($symbol, "\0").as_bytes())?,)*
                        _object: object,
                    })
                }
            }
        }
    };
}

type Stream = *mut c_void;

library! {
    get_version = "ncclGetVersion"(*mut c_int) -> Code;
    get_unique_id = "ncclGetUniqueId"(*mut UniqueId) -> Code;
    get_error_string = "ncclGetErrorString"(Code) -> *const c_char;
    get_last_error = "ncclGetLastError"(*mut RawComm) -> *const c_char;
    init_rank = "ncclCommInitRankConfig"(*mut *mut RawComm, c_int, UniqueId, c_int, *mut Config) -> Code;
    split = "ncclCommSplit"(*mut RawComm, c_int, c_int, *mut *mut RawComm, *mut Config) -> Code;
    async_error = "ncclCommGetAsyncError"(*mut RawComm, *mut Code) -> Code;
    count = "ncclCommCount"(*mut RawComm, *mut c_int) -> Code;
    user_rank = "ncclCommUserRank"(*mut RawComm, *mut c_int) -> Code;
    finalize = "ncclCommFinalize"(*mut RawComm) -> Code;
    destroy = "ncclCommDestroy"(*mut RawComm) -> Code;
    abort = "ncclCommAbort"(*mut RawComm) -> Code;
    group_start = "ncclGroupStart"() -> Code;
    group_end = "ncclGroupEnd"() -> Code;
    all_reduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, *mut RawComm, Stream) -> Code;
    all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, *mut RawComm, Stream) -> Code;
    reduce_scatter =
        "ncclReduceScatter"(*const c_void, *mut c_void, usize, c_int, c_int, *mut RawComm, Stream) -> Code;
    broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, c_int, c_int, *mut RawComm, Stream) -> Code;
    reduce =
        "ncclReduce"(*const c_void, *mut c_void, usize, c_int, c_int, c_int, *mut RawComm, Stream) -> Code;
    send = "ncclSend"(*const c_void, usize, c_int, c_int, *mut RawComm, Stream) -> Code;
    recv = "ncclRecv"(*mut c_void, usize, c_int, c_int, *mut RawComm, Stream) -> Code;
}

impl Library {
    /// The library of this process.
    ///
    /// # Errors
    /// It cannot be found, or is too old. The first answer stays.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
        match LIBRARY.get_or_init(|| Self::open(SONAME)) {
            Ok(library) => Ok(library),
            Err(e) => Err(Error::msg(e)),
        }
    }

    fn open(name: &str) -> std::result::Result<Self, String> {
        let library = Self::load(name).map_err(|e| {
            format!(
                "NCCL cannot be used: {}; install NCCL 2.18 or newer for this CUDA (the driver's package \
                 libnccl2, or pip's nvidia-nccl-cu13) and name the folder with {SONAME} in LD_LIBRARY_PATH",
                chain(&e)
            )
        })?;
        match library.version() {
            Ok(version) if version >= OLDEST => Ok(library),
            Ok(version) => {
                Err(format!("NCCL cannot be used: {name} is {}; expected 2.18 or newer", dotted(version)))
            }
            Err(code) => {
                Err(format!("NCCL cannot be used: {name}: {}", library.explain(code, std::ptr::null_mut())))
            }
        }
    }

    fn version(&self) -> std::result::Result<c_int, Code> {
        let mut version = 0;
        // SAFETY: writes one number.
        match unsafe { (self.get_version)(&mut version) } {
            SUCCESS => Ok(version),
            code => Err(code),
        }
    }

    /// "2.28.9".
    pub(super) fn version_text(&self) -> String {
        self.version().map_or_else(|_| "unknown".to_string(), dotted)
    }

    /// What a code means, with the library's last message. `comm` may be null, and else lives.
    pub(super) fn explain(&self, code: Code, comm: *mut RawComm) -> String {
        // SAFETY: both return null or a null-terminated string that the library owns; it is copied at once.
        let (what, last) =
            unsafe { (text((self.get_error_string)(code)), text((self.get_last_error)(comm))) };
        if last.is_empty() { what } else { format!("{what} ({last})") }
    }
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

/// "2.28.9" of 22809.
fn dotted(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// An error with its causes: the loader's own words are a cause.
fn chain(e: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(e), |e| e.source()).map(ToString::to_string);
    causes.collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_what_to_do() {
        let e = Library::open("libnccl-of-nobody.so.2").err().unwrap();
        for part in ["libnccl-of-nobody.so.2", "cannot open", "2.18", "LD_LIBRARY_PATH"] {
            assert!(e.contains(part), "{e}");
        }
    }

    #[test]
    fn another_library_lacks_the_functions() {
        let e = Library::open("libc.so.6").err().unwrap();
        assert!(e.contains("ncclGetVersion"), "{e}");
    }

    /// Needs the library, as every test of ranks does.
    #[test]
    fn the_installed_library_has_every_function() {
        let library = Library::get().map_err(|e| e.to_string()).unwrap();
        assert!(library.version().unwrap() >= OLDEST, "{}", library.version_text());
        assert_eq!(library.explain(4, std::ptr::null_mut()).split(" (").next(), Some("invalid argument"));
    }

    #[test]
    fn versions_and_layout_are_those_of_the_header() {
        assert_eq!((dotted(22809), dotted(21805)), ("2.28.9".to_string(), "2.18.5".to_string()));
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, split_share)), (48, 40));
        assert_eq!((size_of::<UniqueId>(), align_of::<UniqueId>()), (128, 1));
    }
}

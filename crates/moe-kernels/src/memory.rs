//! The allocator of programs that hold large weights.
//!
//! A decode step reads each weight once, so the time to translate addresses of 4 KiB pages matters, and the matrix
//! registers load rows that cross cache lines at a third of their speed. Large allocations therefore start at a huge
//! page and ask for huge pages; the last page becomes a huge page too if at least half of it is used. Medium
//! allocations start at a cache line, while the system's start 16 bytes after one. All other allocations come from the
//! system. Kernels only get faster by it: their results do not depend on addresses.

use std::alloc::{GlobalAlloc, Layout, System};

/// A global allocator: large allocations on huge pages, on Linux; smaller ones at cache lines.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: moe_kernels::HugePages = moe_kernels::HugePages;
/// assert_eq!(vec![0u8; 5 << 20].as_ptr() as usize % 64, 0);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct HugePages;

// SAFETY: a large allocation is a separate mapping, any other comes from the system allocator. The layout decides which
// of the two it is, and `alloc` and `dealloc` get the same layout.
unsafe impl GlobalAlloc for HugePages {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match mapping::len(layout) {
            Some(len) => mapping::new(len),
            // SAFETY: the caller's promises are the ones that the system allocator needs.
            None => unsafe { System.alloc(at_line(layout)) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match mapping::len(layout) {
            Some(len) => mapping::new(len), // Fresh pages are zeros.
            // SAFETY: as above.
            None => unsafe { System.alloc_zeroed(at_line(layout)) },
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        match mapping::len(layout) {
            // SAFETY: `alloc` made this mapping for a layout of this length.
            Some(len) => unsafe { mapping::remove(start, len) },
            // SAFETY: as above.
            None => unsafe { System.dealloc(start, at_line(layout)) },
        }
    }
}

/// The layout for the system allocator. Kernels read and write vectors of a cache line, so it is aligned to one.
fn at_line(layout: Layout) -> Layout {
    const LINE: usize = 64;
    /// For smaller sizes the system's aligned allocations would cost more than they gain.
    const LEAST: usize = 1024;
    if layout.size() < LEAST { layout } else { layout.align_to(LINE).unwrap_or(layout) }
}

#[cfg(target_os = "linux")]
mod mapping {
    use std::alloc::Layout;

    const HUGE_PAGE: usize = 2 << 20;

    /// Bytes of the mapping for a layout; `None` for layouts that the system allocator serves. The system gives a huge
    /// page only if all of it is mapped, so a page that is half used is mapped completely.
    pub(super) fn len(layout: Layout) -> Option<usize> {
        // SAFETY: asks for a number.
        let page = || unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let unit = || if layout.size() % HUGE_PAGE >= HUGE_PAGE / 2 { HUGE_PAGE } else { page() };
        (layout.size() >= HUGE_PAGE / 2 && layout.align() <= HUGE_PAGE)
            .then(|| layout.size().next_multiple_of(unit()))
    }

    /// A mapping of zeros that starts at a huge page; null if the system refuses it.
    pub(super) fn new(len: usize) -> *mut u8 {
        use libc::{MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, PROT_WRITE};
        let (none, flags) = (std::ptr::null_mut(), MAP_PRIVATE | MAP_ANONYMOUS);
        // SAFETY: a new mapping overlaps no other. The parts that are removed are outside of the part that is returned.
        // The advice does not change contents.
        unsafe {
            let all = libc::mmap(none, len + HUGE_PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
            if all == libc::MAP_FAILED {
                return std::ptr::null_mut();
            }
            let before = (all as usize).next_multiple_of(HUGE_PAGE) - all as usize;
            let start = all.wrapping_byte_add(before);
            if before > 0 {
                libc::munmap(all, before);
            }
            if before < HUGE_PAGE {
                libc::munmap(start.wrapping_byte_add(len), HUGE_PAGE - before);
            }
            libc::madvise(start, len, libc::MADV_HUGEPAGE);
            start.cast()
        }
    }

    /// Unmaps a mapping.
    ///
    /// # Safety
    /// The mapping came from [`new`] with this length and is not used any more.
    pub(super) unsafe fn remove(start: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { libc::munmap(start.cast(), len) };
    }
}

#[cfg(not(target_os = "linux"))]
mod mapping {
    use std::alloc::Layout;

    pub(super) fn len(_layout: Layout) -> Option<usize> {
        None
    }

    pub(super) fn new(_len: usize) -> *mut u8 {
        std::ptr::null_mut()
    }

    pub(super) unsafe fn remove(_start: *mut u8, _len: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes around the limit, and an alignment that no mapping gives.
    #[test]
    fn allocations_are_aligned_zeroed_and_writable() {
        for (size, align) in
            [(1, 1), (1024, 4), (2 << 20, 2), ((2 << 20) - 1, 64), ((5 << 20) + 3, 16), (3 << 20, 4 << 20)]
        {
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: the layout is not empty, and the memory is used inside its bounds and freed once.
            unsafe {
                let start = HugePages.alloc_zeroed(layout);
                assert!(!start.is_null() && (start as usize).is_multiple_of(align));
                assert!(size < 2 << 20 || (start as usize).is_multiple_of(2 << 20));
                assert!(size < 1024 || (start as usize).is_multiple_of(64));
                let bytes = std::slice::from_raw_parts_mut(start, size);
                assert!(bytes.iter().all(|&b| b == 0));
                bytes.fill(7);
                let grown = HugePages.realloc(start, layout, size + (1 << 20));
                assert!(std::slice::from_raw_parts(grown, size).iter().all(|&b| b == 7));
                HugePages.dealloc(grown, Layout::from_size_align(size + (1 << 20), align).unwrap());
            }
        }
    }

    /// At least half of the last page is used, so unused memory is never more than used memory.
    #[cfg(target_os = "linux")]
    #[test]
    fn mappings_end_with_a_huge_page_that_is_half_used() {
        let len =
            |kib: usize| mapping::len(Layout::from_size_align(kib << 10, 64).unwrap()).map(|len| len >> 10);
        let got = [1020, 1024, 2048, 3 << 10, (2 << 10) + 1020, (62 << 10) + 1024].map(len);
        assert_eq!(got, [None, Some(2048), Some(2048), Some(4096), Some(3068), Some(64 << 10)]);
    }

    /// An absurd size is refused and does not abort the process.
    #[test]
    fn a_refused_mapping_is_null() {
        let layout = Layout::from_size_align(1 << 60, 64).unwrap();
        // SAFETY: the layout is not empty.
        assert!(unsafe { HugePages.alloc(layout) }.is_null());
    }
}

//! What NVIDIA's driver has in memory and needs no more once the shader was made and the queues are open.
//!
//! On an H200 (driver 580) none of these files' pages was touched by copies of any path; see
//! docs/performance.md, "What a server takes". Other drivers' files are not known well enough to say.

use std::ffi::CStr;
use std::mem::MaybeUninit;

use super::device::Device;

/// They compile shaders.
const COMPILERS: [&str; 2] = ["libnvidia-gpucomp.so", "libnvidia-glvkspirv.so"];
/// Two whole drivers, for programs with an X display and for others. Both are mapped, and one is used.
const CORES: [&str; 2] = ["libnvidia-glcore.so", "libnvidia-eglcore.so"];

/// The beginnings of their names.
pub(super) fn files(device: &Device) -> Vec<&'static str> {
    let submit = device.api.fp_v1_0().queue_submit;
    let used = CORES
        .into_iter()
        .find(|core| library_of(submit as *const std::ffi::c_void).starts_with(core));
    let unused = CORES
        .into_iter()
        .filter(|core| used.is_some_and(|used| used != *core));
    COMPILERS.into_iter().chain(unused).collect()
}

/// The name of the file that the function at this address is in, without its directories; empty if it is
/// in none.
fn library_of(function: *const std::ffi::c_void) -> String {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: dladdr takes any address and fills `info` if it gives anything but 0 (dladdr(3)); the name
    // is then a string that lives as long as the library is loaded.
    let path = unsafe {
        if libc::dladdr(function, info.as_mut_ptr()) == 0 {
            return String::new();
        }
        let name = info.assume_init().dli_fname;
        if name.is_null() {
            return String::new();
        }
        CStr::from_ptr(name).to_string_lossy()
    };
    path.rsplit('/').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_in_its_library() {
        let of_libc = library_of(libc::getpid as *const std::ffi::c_void);
        assert!(of_libc.starts_with("libc.so"), "{of_libc}");
        assert_eq!(library_of(std::ptr::null()), "");
    }
}

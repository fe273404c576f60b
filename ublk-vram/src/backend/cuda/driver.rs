//! The little of libcuda that allocates memory, looked up when it is needed: nothing links to it, and
//! only the short-lived maker ever loads it.
//!
//! Types and values are those of the CUDA driver API (cuda.h), whose functions are versioned by name and
//! never change. All are looked up at once: a driver that lacks one is refused by its name.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::transmute_copy;

use crate::error::{Error, ErrorKind, Result};

const LIBRARY: &CStr = c"libcuda.so.1";

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: operations on the memory are complete when they return, which
/// others who reach it through the BAR rely on.
const ATTRIBUTE_SYNC_MEMOPS: c_int = 6;

type Status = c_int;

macro_rules! functions {
    ($($(#[$meta:meta])* $field:ident: $name:literal ($($type:ty),*);)*) => {
        /// The functions, by their names in the library.
        struct Functions {
            $($(#[$meta])* $field: unsafe extern "C" fn($($type),*) -> Status,)*
        }

        impl Functions {
            /// # Safety
            /// `library` is an open handle of the CUDA driver library.
            unsafe fn find(library: *mut c_void) -> Result<Functions> {
                $(
                    // SAFETY: the handle is open and the name ends with NUL.
                    let address = unsafe { libc::dlsym(library, $name.as_ptr()) };
                    if address.is_null() {
                        return Err(Error::new(
                            ErrorKind::Unsupported,
                            format!(
                                "the CUDA driver has no {}: install a newer NVIDIA driver",
                                $name.to_string_lossy()
                            ),
                        ));
                    }
                    // SAFETY: the function of that name has this type (cuda.h).
                    let $field = unsafe { transmute_copy(&address) };
                )*
                Ok(Functions { $($field),* })
            }
        }
    };
}

functions! {
    init: c"cuInit" (c_uint);
    count: c"cuDeviceGetCount" (*mut c_int);
    get: c"cuDeviceGet" (*mut c_int, c_int);
    by_address: c"cuDeviceGetByPCIBusId" (*mut c_int, *const c_char);
    address: c"cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    retain: c"cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    set_current: c"cuCtxSetCurrent" (*mut c_void);
    info: c"cuMemGetInfo_v2" (*mut usize, *mut usize);
    allocate: c"cuMemAlloc_v2" (*mut u64, usize);
    set_attribute: c"cuPointerSetAttribute" (*const c_void, c_int, u64);
    name_of: c"cuGetErrorName" (Status, *mut *const c_char);
}

/// A GPU with a context that is current in this thread. Nothing is given back: the process ends soon.
pub(super) struct Gpu {
    functions: Functions,
    /// Its PCI address, as CUDA writes it.
    pub(super) address: String,
}

impl Gpu {
    /// Opens the GPU at a PCI address, or the only one there is.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] without a driver, [`ErrorKind::NotFound`] without such a GPU,
    /// [`ErrorKind::Usage`] if there are several and none was named.
    pub(super) fn open(wanted: Option<&str>) -> Result<Gpu> {
        // SAFETY: the library is the driver's; its constructors expect nothing of us.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "there is no CUDA driver (libcuda.so.1) on this machine: install NVIDIA's driver \
                 (Debian: libcuda1)",
            ));
        }
        // SAFETY: it was just opened and is never closed.
        let functions = unsafe { Functions::find(library) }?;
        let mut gpu = Gpu {
            functions,
            address: String::new(),
        };
        let functions = &gpu.functions;
        // SAFETY: the one flag is reserved and 0.
        gpu.check("cuInit", unsafe { (functions.init)(0) })?;
        let device = gpu.choose(wanted)?;
        let mut text = [0 as c_char; 32];
        let len = c_int::try_from(text.len()).unwrap_or(0);
        // SAFETY: the driver writes at most `len` bytes, NUL included.
        let status = unsafe { (functions.address)(text.as_mut_ptr(), len, device) };
        gpu.check("cuDeviceGetPCIBusId", status)?;
        // SAFETY: the driver ended the text with NUL.
        let address = unsafe { CStr::from_ptr(text.as_ptr()) };
        let address = address.to_string_lossy().to_lowercase();
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is ours, and what comes back in it is made current.
        let status = unsafe { (functions.retain)(&mut context, device) };
        gpu.check("cuDevicePrimaryCtxRetain", status)?;
        // SAFETY: the context was just retained.
        gpu.check("cuCtxSetCurrent", unsafe {
            (functions.set_current)(context)
        })?;
        gpu.address = address;
        Ok(gpu)
    }

    fn choose(&self, wanted: Option<&str>) -> Result<c_int> {
        let mut device = 0;
        if let Some(address) = wanted {
            let text = CString::new(address)
                .map_err(|_| Error::usage("a PCI address has no NUL in it"))?;
            // SAFETY: `device` is ours and the text ends with NUL.
            let status = unsafe { (self.functions.by_address)(&mut device, text.as_ptr()) };
            return match status {
                0 => Ok(device),
                _ => Err(Error::new(
                    ErrorKind::NotFound,
                    format!(
                        "CUDA knows no GPU at {address} ({}): `nvidia-smi` lists those it has",
                        self.name(status)
                    ),
                )),
            };
        }
        let mut count = 0;
        // SAFETY: `count` is ours.
        let status = unsafe { (self.functions.count)(&mut count) };
        self.check("cuDeviceGetCount", status)?;
        match count {
            1 => {
                // SAFETY: `device` is ours, and there is a device 0.
                let status = unsafe { (self.functions.get)(&mut device, 0) };
                self.check("cuDeviceGet", status)?;
                Ok(device)
            }
            0 => Err(Error::new(ErrorKind::NotFound, "CUDA knows no GPU here")),
            _ => Err(Error::usage(format!(
                "there are {count} CUDA GPUs: say which with --gpu ADDRESS"
            ))),
        }
    }

    /// Bytes that can be allocated now.
    pub(super) fn free(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are ours.
        let status = unsafe { (self.functions.info)(&mut free, &mut total) };
        self.check("cuMemGetInfo", status)?;
        Ok(free as u64)
    }

    /// Allocates memory; its GPU address.
    pub(super) fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut address = 0;
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: `address` is ours.
        let status = unsafe { (self.functions.allocate)(&mut address, len) };
        self.check(&format!("cuMemAlloc of {bytes} bytes"), status)?;
        let on = 1u32;
        // SAFETY: the attribute is an unsigned int, read during the call.
        let status = unsafe {
            (self.functions.set_attribute)((&raw const on).cast(), ATTRIBUTE_SYNC_MEMOPS, address)
        };
        self.check("cuPointerSetAttribute(SYNC_MEMOPS)", status)?;
        Ok(address)
    }

    fn name(&self, status: Status) -> String {
        let mut name = std::ptr::null();
        // SAFETY: `name` is ours; what comes back is a constant of the library.
        if unsafe { (self.functions.name_of)(status, &mut name) } != 0 || name.is_null() {
            return format!("error {status}");
        }
        // SAFETY: a constant that ends with NUL.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }

    fn check(&self, what: &str, status: Status) -> Result<()> {
        let kind = match status {
            0 => return Ok(()),
            2 => ErrorKind::NoSpace,    // CUDA_ERROR_OUT_OF_MEMORY
            100 => ErrorKind::NotFound, // CUDA_ERROR_NO_DEVICE
            _ => ErrorKind::Io,
        };
        Err(Error::new(kind, format!("{what}: {}", self.name(status))))
    }
}

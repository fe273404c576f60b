//! The Vulkan library and an instance of it, found when they are needed: a server of another backend
//! neither has nor wants them.

use ash::{Entry, LoadingError, vk};

use crate::error::{Error, ErrorKind, Result};

/// What the backend asks of: 1.1 has device identities, memory limits and external memory; 1.2 is
/// asked for where it is there, for the driver's name.
const WANTED_VERSION: u32 = vk::API_VERSION_1_2;

/// A Vulkan instance. It ends, and the library is let go, when this is dropped.
pub(super) struct Instance {
    pub(super) api: ash::Instance,
    _library: Entry,
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: everything made from the instance keeps it alive, so nothing is left of it.
        unsafe { self.api.destroy_instance(None) };
    }
}

impl Instance {
    /// Loads the library and makes an instance.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if there is no Vulkan loader, no driver, or one that is too old.
    pub(super) fn new() -> Result<Instance> {
        // SAFETY: the library is the system's Vulkan loader, whose constructors expect nothing of us.
        Instance::with(loaded(unsafe { Entry::load() })?)
    }

    fn with(library: Entry) -> Result<Instance> {
        // SAFETY: the function takes no handles.
        let version = unsafe { library.try_enumerate_instance_version() }
            .map_err(|result| failed("cannot ask the Vulkan loader for its version", result))?;
        if version.is_none_or(|version| version < vk::API_VERSION_1_1) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the Vulkan loader offers version 1.0 and 1.1 is needed: install a newer libvulkan1",
            ));
        }
        let application = vk::ApplicationInfo::default()
            .application_name(c"ublk-vram")
            .api_version(WANTED_VERSION);
        let info = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: `info` and what it points to outlive the call.
        match unsafe { library.create_instance(&info, None) } {
            Ok(api) => Ok(Instance {
                api,
                _library: library,
            }),
            Err(vk::Result::ERROR_INCOMPATIBLE_DRIVER) => Err(Error::new(
                ErrorKind::Unsupported,
                "no GPU driver with Vulkan is installed: install the one for this GPU \
                 (Debian: nvidia-vulkan-icd or mesa-vulkan-drivers)",
            )),
            Err(result) => Err(failed("cannot make a Vulkan instance", result)),
        }
    }
}

/// Keeps overlays, recorders and the like, which a desktop installs as implicit layers, out of a process
/// that serves swap as root. The loader looks at this variable (since 1.3.234; older ones load them) when
/// an instance is made. What the user has set stays.
///
/// # Safety
/// The process has one thread, as at the start of `main`: another one might read the environment.
pub unsafe fn keep_layers_out() {
    const VARIABLE: &str = "VK_LOADER_LAYERS_DISABLE";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: by the caller's promise nobody reads the environment now.
        unsafe { std::env::set_var(VARIABLE, "~implicit~") };
    }
}

/// Turns what loading the library gave into one sentence.
pub(super) fn loaded(outcome: Result<Entry, LoadingError>) -> Result<Entry> {
    outcome.map_err(|error| {
        Error::new(
            ErrorKind::Unsupported,
            format!(
                "the Vulkan loader is not installed or cannot be loaded: install libvulkan1 (Debian) \
                 or vulkan-loader ({error})"
            ),
        )
    })
}

/// A failed Vulkan call: `what` names the call and its object, the result gives kind and cause.
pub(super) fn failed(what: impl std::fmt::Display, result: vk::Result) -> Error {
    let kind = match result {
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY
        | vk::Result::ERROR_OUT_OF_HOST_MEMORY
        | vk::Result::ERROR_MEMORY_MAP_FAILED
        | vk::Result::ERROR_TOO_MANY_OBJECTS => ErrorKind::NoSpace,
        vk::Result::ERROR_EXTENSION_NOT_PRESENT
        | vk::Result::ERROR_FEATURE_NOT_PRESENT
        | vk::Result::ERROR_INCOMPATIBLE_DRIVER => ErrorKind::Unsupported,
        vk::Result::ERROR_NOT_PERMITTED_KHR => ErrorKind::Permission,
        _ => ErrorKind::Io,
    };
    let cause = match result {
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY => "the GPU has no more memory for it".to_owned(),
        vk::Result::ERROR_OUT_OF_HOST_MEMORY => "the driver got no system memory".to_owned(),
        vk::Result::ERROR_DEVICE_LOST => {
            "the GPU was lost, by a reset or a failure of its driver".to_owned()
        }
        vk::Result::ERROR_MEMORY_MAP_FAILED => {
            "the driver has no room to map it for the CPU".to_owned()
        }
        other => format!("{other} ({other:?})"),
    };
    Error::new(kind, format!("{what}: {cause}"))
}

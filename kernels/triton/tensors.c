/* Tensors, looked at through the C functions that torch keeps as they are for models compiled ahead of time (shim.h of
   its AOTInductor). First of the files that native.py puts together. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* what those take: the address of an at::Tensor */
typedef char *Handle;

/* the functions, in the order in which native.py names them; what is not 0 tells of an error */
static struct {
    int32_t (*layout)(Handle, int32_t *);
    int32_t (*data_ptr)(Handle, int64_t *);
    int32_t (*numel)(Handle, int64_t *);
    int32_t (*storage_offset)(Handle, int64_t *);
    int32_t (*dim)(Handle, int64_t *);
    int32_t (*sizes)(Handle, int64_t **);
    int32_t (*strides)(Handle, int64_t **);
    int32_t (*dtype)(Handle, int32_t *);
    int32_t (*device_type)(Handle, int32_t *);
    int32_t (*device_index)(Handle, int32_t *);
} shim;

/* layouts and dtypes by their numbers in C++ */
enum { STRIDED = 0, FIRST_COMPLEX = 8, LAST_COMPLEX = 10, MAX_ITEMSIZE = 16 };
enum { DIMS = 64, WORDS = 5 + 2 * DIMS };

/* where the at::Tensor of a tensor in Python is */
static Py_ssize_t handle_at;
static PyTypeObject *tensor_type;
static PyTypeObject *parameter_type;
static PyObject *is_conj, *is_neg;

/* an attribute of tensors, and how torch's own classes get it */
typedef struct {
    PyObject *name;
    const PyGetSetDef *own;
} Attribute;
static Attribute grad, version;

/* int64 numbers, as many as there come to be */
typedef struct {
    int64_t *data;
    size_t used, room;
} Numbers;

static int reserve(Numbers *numbers, size_t more) {
    if (numbers->used + more <= numbers->room)
        return 0;
    size_t room = 2 * (numbers->used + more);
    int64_t *data = PyMem_Realloc(numbers->data, room * sizeof(int64_t));
    if (!data) {
        PyErr_NoMemory();
        return -1;
    }
    numbers->data = data;
    numbers->room = room;
    return 0;
}

/* -1 with an exception, or for a count that tells of one */
static int append(Numbers *numbers, const int64_t *words, int count) {
    if (count < 0 || reserve(numbers, (size_t)count))
        return -1;
    memcpy(numbers->data + numbers->used, words, (size_t)count * sizeof *words);
    numbers->used += (size_t)count;
    return 0;
}

/* a new reference; NULL with an exception */
static PyObject *get(PyObject *tensor, const Attribute *attribute) {
    if (Py_IS_TYPE(tensor, parameter_type) || Py_IS_TYPE(tensor, tensor_type))
        return attribute->own->get(tensor, attribute->own->closure);
    return PyObject_GetAttr(tensor, attribute->name);
}

/* add the version counter of a tensor; -1 with an exception */
static int add_version(PyObject *tensor, long long *sum) {
    PyObject *one = get(tensor, &version);
    *sum += one ? PyLong_AsLongLong(one) : 0;
    Py_XDECREF(one);
    return PyErr_Occurred() ? -1 : 0;
}

/* whether a method of the tensor says yes; -1 with an exception */
static int says(PyObject *tensor, PyObject *method) {
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, method);
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return yes;
}

/* whether memory holds the conjugate or the negative of what the tensor means; -1 with an exception */
static int is_lazy(PyObject *tensor, int32_t dtype, int64_t dim, const int64_t *sizes, const int64_t *strides) {
    if (dtype >= FIRST_COMPLEX && dtype <= LAST_COMPLEX)
        return says(tensor, is_conj);
    /* a lazy negative is the imaginary part of a lazy conjugate, whose elements are never next to each other */
    for (int64_t i = 0; i < dim; i++)
        if (strides[i] == 1 && sizes[i] > 1)
            return 0;
    return says(tensor, is_neg);
}

/* find the handle and the address of a tensor, 0 if it is empty; -1 with an exception if it has elements and no
   address */
static int locate(PyObject *tensor, Handle *handle, int64_t *address) {
    int32_t layout;
    int64_t offset, numel;
    if (PyObject_TypeCheck(tensor, tensor_type)) {
        *handle = (Handle)tensor + handle_at;
        if (!shim.layout(*handle, &layout) && layout == STRIDED && !shim.data_ptr(*handle, address) &&
            !shim.storage_offset(*handle, &offset) && !shim.numel(*handle, &numel) &&
            /* the address of a tensor without memory is its offset in bytes */
            (*address > MAX_ITEMSIZE * offset || numel == 0))
            return 0;
    }
    PyErr_SetString(PyExc_RuntimeError, "a tensor without an address");
    return -1;
}

/* what a tensor, or None, is but for its address and values: the words of it, at most WORDS; -1 with an exception */
static int describe(PyObject *tensor, int64_t *address, int64_t *out) {
    *address = 0;
    *out = -1;
    if (tensor == Py_None)
        return 1;
    Handle handle;
    if (locate(tensor, &handle, address))
        return -1;
    int64_t dim, *sizes, *strides;
    int32_t dtype, device_type, device_index;
    if (shim.dim(handle, &dim) || shim.sizes(handle, &sizes) || shim.strides(handle, &strides) ||
        shim.dtype(handle, &dtype) || shim.device_type(handle, &device_type) ||
        shim.device_index(handle, &device_index) || dim > DIMS) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor that torch does not describe, or of too many dimensions");
        return -1;
    }
    int lazy = is_lazy(tensor, dtype, dim, sizes, strides);
    if (lazy < 0)
        return -1;
    out[0] = dim;
    out[1] = dtype;
    out[2] = device_type;
    out[3] = device_index;
    out[4] = lazy;
    for (int64_t i = 0; i < dim; i++) {
        out[5 + 2 * i] = sizes[i];
        /* of one element any stride will do */
        out[6 + 2 * i] = sizes[i] == 1 ? 1 : strides[i];
    }
    return 5 + 2 * (int)dim;
}

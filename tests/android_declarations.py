"""Declarations of the classes of Android that `examples/hosts/android` calls, from the reference of API 26 and 28.

Source: https://developer.android.com/reference. They let a desktop's compiler check the calls; they do nothing.
"""

from __future__ import annotations

from pathlib import Path

_ANY = "throw new RuntimeException();"
_CLASSES = {
    "android.app.Activity": """extends android.content.Context {
        public static final int RESULT_OK = -1;
        protected void onCreate(android.os.Bundle saved) {}
        protected void onDestroy() {}
        protected void onActivityResult(int request, int result, android.content.Intent data) {}
        public void startActivityForResult(android.content.Intent intent, int request) {}
        public final void runOnUiThread(Runnable action) {}
        public void setContentView(android.view.View view) {} }""",
    "android.content.Context": """{
        public java.io.File getFilesDir() { ANY }
        public java.io.File getCacheDir() { ANY }
        public android.content.res.AssetManager getAssets() { ANY }
        public android.content.ContentResolver getContentResolver() { ANY } }""",
    "android.content.ClipData": """{
        public static class Item { public android.net.Uri getUri() { ANY } }
        public int getItemCount() { ANY }
        public Item getItemAt(int index) { ANY } }""",
    "android.content.ContentResolver": """{
        public final java.io.InputStream openInputStream(android.net.Uri uri)
            throws java.io.FileNotFoundException { ANY } }""",
    "android.content.Intent": """{
        public static final String ACTION_OPEN_DOCUMENT = "", CATEGORY_OPENABLE = "", EXTRA_ALLOW_MULTIPLE = "";
        public Intent(String action) {}
        public Intent addCategory(String category) { ANY }
        public Intent setType(String type) { ANY }
        public Intent putExtra(String name, boolean value) { ANY }
        public android.net.Uri getData() { ANY }
        public android.os.Bundle getExtras() { ANY }
        public ClipData getClipData() { ANY } }""",
    "android.content.res.AssetManager": """{
        public String[] list(String path) throws java.io.IOException { ANY }
        public java.io.InputStream open(String name) throws java.io.IOException { ANY } }""",
    "android.graphics.Bitmap": """{
        public int getWidth() { ANY }
        public int getHeight() { ANY }
        public void recycle() {}
        public static Bitmap createBitmap(Bitmap source, int x, int y, int width, int height) { ANY }
        public static Bitmap createScaledBitmap(Bitmap source, int width, int height, boolean filter) { ANY }
        public void getPixels(int[] pixels, int offset, int stride, int x, int y, int width, int height) {} }""",
    "android.graphics.BitmapFactory": """{
        public static Bitmap decodeStream(java.io.InputStream stream) { ANY } }""",
    "android.graphics.ImageDecoder": """{
        public static final int ALLOCATOR_SOFTWARE = 1;
        public static class Source {}
        public static class ImageInfo { public android.util.Size getSize() { ANY } }
        public interface OnHeaderDecodedListener {
            void onHeaderDecoded(ImageDecoder decoder, ImageInfo info, Source source); }
        public static Source createSource(android.content.ContentResolver resolver, android.net.Uri uri) { ANY }
        public static Bitmap decodeBitmap(Source source, OnHeaderDecodedListener listener)
            throws java.io.IOException { ANY }
        public void setAllocator(int allocator) {}
        public void setTargetSampleSize(int size) {} }""",
    "android.net.Uri": "{}",
    "android.os.Build": """{
        public static final String FINGERPRINT = "";
        public static class VERSION { public static final int SDK_INT = Integer.parseInt("28"); } }""",
    "android.os.Bundle": "{ public Object get(String key) { ANY } }",
    "android.provider.MediaStore": '{ public static final String ACTION_IMAGE_CAPTURE = ""; }',
    "android.util.Size": "{ public int getWidth() { ANY } public int getHeight() { ANY } }",
    "android.view.View": """{
        public interface OnClickListener { void onClick(View view); }
        public View(android.content.Context context) {}
        public void setOnClickListener(OnClickListener listener) {}
        public void setEnabled(boolean enabled) {}
        public void setFitsSystemWindows(boolean fits) {}
        public void setPadding(int left, int top, int right, int bottom) {} }""",
    "android.view.ViewGroup": """extends View {
        public ViewGroup(android.content.Context context) { super(context); }
        public void addView(View child) {} }""",
    "android.widget.ArrayAdapter": """<T> implements SpinnerAdapter {
        public ArrayAdapter(android.content.Context context, int resource, T[] objects) {} }""",
    "android.widget.Button": "extends TextView { public Button(android.content.Context context) { super(context); } }",
    "android.widget.EditText": """extends TextView {
        public EditText(android.content.Context context) { super(context); }
        @Override public android.text.Editable getText() { ANY } }""",
    "android.widget.LinearLayout": """extends android.view.ViewGroup {
        public static final int VERTICAL = 1;
        public LinearLayout(android.content.Context context) { super(context); }
        public void setOrientation(int orientation) {} }""",
    "android.widget.ScrollView": """extends android.view.ViewGroup {
        public ScrollView(android.content.Context context) { super(context); } }""",
    "android.widget.Spinner": """extends android.view.ViewGroup {
        public Spinner(android.content.Context context) { super(context); }
        public void setAdapter(SpinnerAdapter adapter) {}
        public Object getSelectedItem() { ANY }
        public int getSelectedItemPosition() { ANY } }""",
    "android.widget.TextView": """extends android.view.View {
        public TextView(android.content.Context context) { super(context); }
        public final void append(CharSequence text) {}
        public final void setText(int text) {}
        public final void setHint(int text) {}
        public void setSingleLine() {}
        public CharSequence getText() { ANY } }""",
    "android.R": "{ public static class layout { public static final int simple_spinner_dropdown_item = 1; } }",
}
_INTERFACES = {"android.text.Editable": "extends CharSequence {}", "android.widget.SpinnerAdapter": "{}"}


def write(folder: Path, strings: list[str]) -> list[Path]:
    """Write the declarations, and R of an app with these strings; return the files."""
    of_app = "".join(f"public static final int {name} = {i}; " for i, name in enumerate(strings))
    classes = {**_CLASSES, "graphopt.phone.R": f"{{ public static class string {{ {of_app}}} }}"}
    paths = []
    for kind, bodies in (("class", classes), ("interface", _INTERFACES)):
        for name, body in bodies.items():
            package, _, short = name.rpartition(".")
            paths.append(folder / f"{name.replace('.', '/')}.java")
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            body = f" {body}" if not body.startswith("<") else body
            paths[-1].write_text(f"package {package};\n\npublic {kind} {short}{body.replace('ANY', _ANY)}\n")
    return paths
